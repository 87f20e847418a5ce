"""Prefetching beside a stand-in for a collective: the step of a layer, by bytes that are asked for.

    python benchmarks/prefetch.py [--quick] [--tiny] [--sms 8] [--captures 5] [--out FOLDER]
    python benchmarks/fit_prefetch.py FOLDER/prefetch.jsonl

A kernel holds some SMs for 5 to 40 us, as a collective would, while weights (a GEMV of 8B's or of
70B's layers on eight devices) or pages of keys (a decoding step) are prefetched on a side stream;
then they are read. A figure is the time of all that in a CUDA graph that goes over copies of the
inputs, so that L2 is cold. Each comes from several graphs, captured anew after all other steps of
the reader, since one graph in ten is off by half a microsecond and more, in all of its replays.
Beside each stands what the paper's model predicts, from the bandwidth that reading has in the same
run. One reader is measured with more CTAs that ask. Then the model of `Overlap` is fitted to half
of the cases, as `fit_prefetch.py` does again from the file, and the budgets that it chooses are
run, for all cases. Those of the other half tell what it is worth.

L2's hits are told by ncu, which runs one kernel after another, so that they are those of a
collective that lasts long enough:

    ncu --cache-control none --kernel-name regex:gemv --metrics \
        lts__t_sectors_op_read_lookup_hit.sum,lts__t_sectors_op_read.sum \
        python benchmarks/prefetch.py --once 16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from batches import page_table
from fit_prefetch import (
    Models,
    checked_fit,
    chip_of,
    fit_table,
    for_each,
    halves,
    reader_of,
    timed_rows,
    told,
)
from harness import QUICK, Case, Effort, Report, Row, copies_needed, placed, replay_times
from rich.table import Table
from stand_in import StandIn

import warploom as wl
from warploom.prefetch import (
    Accelerator,
    beside,
    beside_pages,
    predict,
)

COLLECTIVE_SMS = 16
SECONDS = (5e-6, 10e-6, 20e-6, 40e-6)
BUDGETS = (2, 4, 8, 12, 16, 24, 32, 40)  # MB; the last are more than a half of L2
MORE_SMS = (16, 32)
SWEPT = "70B/TP8 gate, up"  # the reader that is measured with more CTAs
TINY_BUDGETS = (0.016, 0.03)
NORMAL = Effort(seconds=0.1)
MB = 10**6
PAGE, DIM = 16, 128


@dataclass(frozen=True)
class Reader:
    """What reads behind the collective: one of the copies of its inputs.

    Attributes:
        name: of it.
        bytes: that it reads.
        read: reads them.
        fetch: is given a budget and CTAs; a block beside which it runs.
        least: budget.
    """

    name: str
    bytes: int
    read: Callable[[], torch.Tensor]
    fetch: Callable[[int, int], Any]
    least: int = 128


def weights(tiny: bool) -> Iterator[tuple[str, int, int]]:
    """Outputs and inputs of the products of a layer on one device."""
    if tiny:
        yield "tiny", 64, 128
        return
    yield "8B qkv", 6144, 4096
    yield "8B gate, up", 28672, 4096
    yield "70B/TP8 qkv", 1280, 8192
    yield "70B/TP8 out", 8192, 1024
    yield "70B/TP8 gate, up", 7168, 8192
    yield "70B/TP8 down", 8192, 3584


def product(name: str, outputs: int, inputs: int, device: torch.device) -> Reader:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
    x = torch.randn(1, inputs, device=device, dtype=dtype)
    size = weight.numel() * weight.element_size()

    def fetch(budget: int, sms: int) -> Any:
        return beside(weight, budget, sms=sms)

    return Reader(name, size, partial(torch.nn.functional.linear, x, weight), fetch)


def decoding(name: str, heads: int, kv_heads: int, device: torch.device, tiny: bool) -> Reader:
    requests, tokens = (2, 40) if tiny else (8, 4096)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(PAGE), num_q_heads=heads, num_kv_heads=kv_heads,
        head_dim=DIM, dtype=dtype, device=device,
    )  # fmt: skip
    indptr, indices, last = page_table((tokens,) * requests, PAGE)
    attention.plan(list(range(requests + 1)), indptr, indices, last)
    cache = torch.randn(len(indices), 2, PAGE, kv_heads, DIM, device=device, dtype=dtype)
    q = torch.randn(requests, heads, DIM, device=device, dtype=dtype)
    size = cache.numel() * cache.element_size()

    def fetch(budget: int, sms: int) -> Any:
        return beside_pages(attention, cache, budget, sms=sms)

    return Reader(name, size, partial(attention.run, q, cache), fetch, size // len(cache))


def readers(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], Reader]]]:
    for name, outputs, inputs in weights(tiny):
        yield name, partial(product, name, outputs, inputs, device)
    shapes = (("tiny keys", 2, 1),) if tiny else (("8B keys", 32, 8), ("70B/TP8 keys", 8, 1))
    for name, heads, kv_heads in shapes:
        yield name, partial(decoding, name, heads, kv_heads, device, tiny)


def step(stand_in: StandIn, reader: Reader, seconds: float, budget: int, sms: int) -> torch.Tensor:
    """The collective, the prefetch beside it, and the reads."""
    if budget:
        with reader.fetch(budget, sms):
            stand_in(seconds)
    else:
        stand_in(seconds)
    return reader.read()


@dataclass(frozen=True)
class Setting:
    """How a step is run; a budget of 0 is no prefetch."""

    seconds: float
    budget: int
    impl: str
    sms: int


@dataclass(frozen=True)
class Bench:
    """One run: where, how carefully, and from how many graphs each figure comes."""

    device: torch.device
    effort: Effort
    chip: Accelerator
    sms: int
    captures: int

    def timed(self, copies: list[Reader], settings: Sequence[Setting]) -> Iterator[Row]:
        """All steps in turn, as often as there are captures, so that a slow minute is in none."""
        stand_in = StandIn(self.device, COLLECTIVE_SMS)
        times: list[list[float]] = [[] for _ in settings]
        for _ in range(self.captures):
            for at, mine in zip(settings, times, strict=True):
                thunks = [
                    partial(step, stand_in, one, at.seconds, at.budget, at.sms) for one in copies
                ]
                mine += replay_times(thunks, self.device, self.effort)
        for at, mine in zip(settings, times, strict=True):
            yield self.row(copies, at, sorted(mine))

    def row(self, copies: list[Reader], at: Setting, times: list[float]) -> Row:
        """A step's median, with what the paper's model predicts in `params`."""
        first, ms = copies[0], times[len(times) // 2]
        by_paper = predict(self.chip, at.seconds, first.bytes, at.budget)
        params = {
            "collective_us": 1e6 * at.seconds, "budget": at.budget, "bytes": first.bytes,
            "sms": at.sms, "collective_sms": COLLECTIVE_SMS, "captures": self.captures,
            "bandwidth": self.chip.memory_bandwidth,
            "predicted_saved_us": 1e6 * by_paper.saved, "predicted_hits": by_paper.hits,
        }  # fmt: skip
        return Row(
            "prefetch", f"{first.name}, {1e6 * at.seconds:.0f} us", at.impl, 1e3 * ms, "us", ms,
            times[len(times) // 10], times[len(times) * 9 // 10], len(times), len(copies),
            params=params,
        )  # fmt: skip

    def rows(self, copies: list[Reader], durations: Any, budgets: Any) -> Iterator[Row]:
        """Steps without and with each budget, which a plan's first page at least must fit."""
        first = copies[0]
        given = [round(n * MB) for n in budgets if first.least <= n * MB < 1.2 * first.bytes]
        settings = []
        for seconds in durations:
            settings.append(Setting(seconds, 0, "none", self.sms))
            for budget in given:
                settings.append(Setting(seconds, budget, f"{budget / MB:g} MB", self.sms))
            for sms in MORE_SMS if first.name == SWEPT else ():
                for budget in given:
                    impl = f"{budget / MB:g} MB, {sms} CTAs"
                    settings.append(Setting(seconds, budget, impl, sms))
        yield from self.timed(copies, settings)

    def chosen(self, models: Models, copies: list[Reader], durations: Any) -> Iterator[Row]:
        """Steps with the budgets that fitted models choose, each beside one without."""
        first = copies[0]
        model = models[first.name]
        settings = []
        for seconds in durations:
            budget = model.best_bytes(seconds, first.bytes, self.sms)
            budget = budget if budget >= first.least else 0
            settings.append(Setting(seconds, 0, "none again", self.sms))
            settings.append(Setting(seconds, budget, "chosen", self.sms))
        for at, row in zip(settings, self.timed(copies, settings), strict=True):
            saved = model.saved(at.seconds, first.bytes, at.budget, self.sms)
            fitted = {"fitted_saved_us": 1e6 * saved} if at.impl == "chosen" else {}
            yield replace(row, params={**row.params, **fitted})


def read_bandwidth(device: torch.device, effort: Effort) -> float:
    """Bytes a second of a sum over more than L2 holds."""
    x = torch.ones(1 << 18 if device.type == "cpu" else 1 << 28, device=device)
    ms = sorted(replay_times([x.sum], device, effort))[0]
    return x.numel() * x.element_size() / (1e-3 * ms)


def summary(rows: list[Row]) -> Table:
    """Time saved with the best budget, and with the chosen one as the fit predicts it."""
    held_out = {one.case for one in halves(timed_rows(rows))[1]}
    columns = "step", "none", "best", "saved", "chosen", "saved", "fit", "left out"
    table = Table(*columns, title="us")
    for case in dict.fromkeys(row.case for row in rows):
        mine = {row.impl: row for row in rows if row.case == case}
        plain, again, chosen = (mine[name] for name in ("none", "none again", "chosen"))
        given = [row for name, row in mine.items() if name not in ("none again", "chosen")]
        best = min(given, key=lambda row: row.value or float("inf"))
        saved = [(a.value or 0.0) - (b.value or 0.0) for a, b in ((plain, best), (again, chosen))]
        size = f"{chosen.params['budget'] / MB:.1f} MB"
        fitted = f"{chosen.params['fitted_saved_us']:.1f}"
        cells = f"{plain.value:.1f}", best.impl, f"{saved[0]:.1f}", size, f"{saved[1]:.1f}", fitted
        table.add_row(case, *cells, "yes" if case in held_out else "")
    return table


def draw(rows: list[Row], models: Models, path: Path) -> None:
    """Time saved by bytes asked for, and saved against predicted: cases that were left out."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    timed = timed_rows(rows)
    names = list(dict.fromkeys(reader_of(one.case) for one in timed))
    columns = 3
    lines = -(-(len(names) + 1) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4 * columns, 3 * lines), squeeze=False, layout="constrained"
    )
    sms = timed[0].sms
    for name, ax in zip(names, axes.flat, strict=False):
        own = [one for one in timed if reader_of(one.case) == name and one.sms == sms]
        for color, case in enumerate(dict.fromkeys(one.case for one in own)):
            mine = [one for one in own if one.case == case]
            at = [0.0, *(one.asked / MB for one in mine)]
            label = case.rpartition(", ")[2]
            ax.plot(at, [0.0, *(1e6 * one.saved for one in mine)], f"C{color}", label=label)
            ax.plot(at, [0.0, *(1e6 * told(models, one) for one in mine)], f"C{color}--", lw=0.8)
        ax.set(title=name, xlabel="MB asked for (dashes: fit)", ylabel="us saved")
        ax.legend(fontsize=6)
    last = axes.flat[len(names)]
    fitted_to, left_out = halves(timed)
    for half, label in ((fitted_to, "fitted to"), (left_out, "left out")):
        at = [1e6 * told(models, one) for one in half]
        last.plot(at, [1e6 * one.saved for one in half], ".", ms=4, label=label)
    low, high = last.get_xlim()
    last.plot((low, high), (low, high), "k", lw=0.6)
    last.set(title="all steps", xlabel="us saved, by the fit", ylabel="us saved")
    last.legend(fontsize=6)
    for ax in axes.flat[len(names) + 1 :]:
        ax.set_axis_off()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def run_once(device: torch.device, megabytes: int, sms: int) -> None:
    """One step of 70B's output projection, for ncu."""
    reader = product("once", 8192, 1024, device)
    stand_in = StandIn(device, COLLECTIVE_SMS)
    step(stand_in, reader, SECONDS[-1], megabytes * MB, sms)
    torch.empty(1 << 28, device=device).zero_()  # nothing of the warm-up stays in L2
    step(stand_in, reader, SECONDS[-1], megabytes * MB, sms)
    torch.cuda.synchronize(device)


def own_models(rows: list[Row], chip: Accelerator) -> Models:
    """Fitted to half of the cases, each reader with its own constant from there."""
    return for_each(checked_fit(rows, chip)[0], halves(timed_rows(rows))[0])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer budgets, short measurements")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on the CPU")
    parser.add_argument("--sms", type=int, default=8, help="CTAs of a prefetch")
    parser.add_argument("--captures", type=int, default=5, help="graphs for each figure")
    parser.add_argument("--once", type=int, metavar="MB", help="one step, for ncu")
    given = argv if argv is None or "--tiny" not in argv else [*argv, "--device", "cpu"]
    options = placed(parser, given)
    device = options.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if options.once is not None:
        run_once(device, options.once, options.sms)
        return
    effort = QUICK if options.quick or options.tiny else NORMAL
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    chip = chip_of(name, read_bandwidth(device, effort))
    report = Report("prefetch", device, options.out)
    bench = Bench(device, effort, chip, options.sms, options.captures)
    durations = SECONDS[1::2] if options.quick else SECONDS
    budgets = TINY_BUDGETS if options.tiny else BUDGETS[1::3] if options.quick else BUDGETS
    kept = []  # all readers, for the budgets that are chosen at the end
    for name, make in readers(device, options.tiny):
        first = make()
        copies = copies_needed(Case(name, 0, "us", first.bytes), device)
        kept.append([first, *(make() for _ in range(copies - 1))])
        for row in bench.rows(kept[-1], durations, budgets):
            report.add(row)
    models = own_models(report.rows, chip)
    for inputs in kept:
        for row in bench.chosen(models, inputs, durations):
            report.add(row)
    model, *found = checked_fit(report.rows, chip)  # steps without a prefetch were run again
    report.console.print(summary(report.rows))
    report.console.print(fit_table(model, *found))
    report.console.print(repr(model))
    draw(report.rows, own_models(report.rows, chip), options.out / "prefetch.png")


if __name__ == "__main__":
    main()
