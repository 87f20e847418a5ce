"""Prefetching beside a stand-in for a collective: the step of a layer, by bytes that are asked for.

    python benchmarks/prefetch.py [--quick] [--tiny] [--sms 8] [--out FOLDER]

A kernel holds some SMs for 5 to 40 us, as a collective would, while weights (a GEMV of 8B's or of
70B's layers on eight devices) or pages of keys (a decoding step) are prefetched on a side stream;
then they are read. A figure is the time of all that in a CUDA graph that goes over copies of the
inputs, so that L2 is cold. Beside each stands what the model predicts, from the bandwidth that
reading has in the same run. The last column is the budget that the model chooses.

L2's hits are told by ncu, which runs one kernel after another, so that they are those of a
collective that lasts long enough:

    ncu --cache-control none --kernel-name regex:gemv --metrics \
        lts__t_sectors_op_read_lookup_hit.sum,lts__t_sectors_op_read.sum \
        python benchmarks/prefetch.py --once 16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from batches import page_table
from harness import QUICK, Case, Effort, Report, Row, copies_needed, placed, replay_times
from rich.table import Table
from stand_in import StandIn

import warploom as wl
from warploom.prefetch import (
    H200,
    Accelerator,
    accelerator_named,
    beside,
    beside_pages,
    best_bytes,
    predict,
)

COLLECTIVE_SMS = 16
SECONDS = (5e-6, 10e-6, 20e-6, 40e-6)
BUDGETS = (4, 8, 12, 16, 20, 24, 28, 32, 40, 50, 60)  # MB
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
class Bench:
    """One run: where, and how carefully."""

    device: torch.device
    effort: Effort
    chip: Accelerator
    sms: int

    def row(self, copies: list[Reader], seconds: float, budget: int, impl: str) -> Row:
        """The time of one step, with the model's in `params`."""
        stand_in, first = StandIn(self.device, COLLECTIVE_SMS), copies[0]
        thunks = [partial(step, stand_in, one, seconds, budget, self.sms) for one in copies]
        times = sorted(replay_times(thunks, self.device, self.effort))
        ms = times[len(times) // 2]
        told = predict(self.chip, seconds, first.bytes, budget)
        params = {
            "collective_us": 1e6 * seconds, "budget": budget, "bytes": first.bytes,
            "sms": self.sms, "collective_sms": COLLECTIVE_SMS,
            "predicted_saved_us": 1e6 * told.saved, "predicted_hits": told.hits,
        }  # fmt: skip
        return Row(
            "prefetch", f"{first.name}, {1e6 * seconds:.0f} us", impl, 1e3 * ms, "us", ms,
            times[len(times) // 10], times[len(times) * 9 // 10], len(times), len(copies),
            params=params,
        )  # fmt: skip

    def rows(self, copies: list[Reader], durations: Any, budgets: Any) -> Iterator[Row]:
        first = copies[0]
        for seconds in durations:
            yield self.row(copies, seconds, 0, "none")
            for budget in (n * MB for n in budgets if n * MB < 1.5 * first.bytes):
                yield self.row(copies, seconds, budget, f"{budget // MB} MB")
            chosen = best_bytes(self.chip, seconds, first.bytes)
            yield self.row(copies, seconds, chosen if chosen >= first.least else 0, "chosen")


def read_bandwidth(device: torch.device, effort: Effort) -> float:
    """Bytes a second of a sum over more than L2 holds."""
    x = torch.ones(1 << 18 if device.type == "cpu" else 1 << 28, device=device)
    ms = sorted(replay_times([x.sum], device, effort))[0]
    return x.numel() * x.element_size() / (1e-3 * ms)


def summary(rows: list[Row]) -> Table:
    """Time saved, measured and predicted, with the best budget and with the chosen one."""
    table = Table("step", "none", "best", "saved", "chosen", "saved", "predicted", title="us")
    for case in dict.fromkeys(row.case for row in rows):
        mine = {row.impl: row for row in rows if row.case == case}
        plain, chosen = mine["none"].value or 0.0, mine["chosen"]
        best = min(mine.values(), key=lambda row: row.value or float("inf"))
        saved = [plain - (row.value or 0.0) for row in (best, chosen)]
        told = chosen.params["predicted_saved_us"]
        size = f"{chosen.params['budget'] / MB:.0f} MB"
        cells = f"{plain:.1f}", best.impl, f"{saved[0]:.1f}", size, f"{saved[1]:.1f}", f"{told:.1f}"
        table.add_row(case, *cells)
    return table


def draw(rows: list[Row], path: Path) -> None:
    """Time saved by bytes asked for: lines are measured, dashes predicted."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.case.rpartition(",")[0] for row in rows))
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4 * columns, 3 * lines), squeeze=False, layout="constrained"
    )
    for name, ax in zip(names, axes.flat, strict=False):
        mine = [row for row in rows if row.case.rpartition(",")[0] == name]
        for color, case in enumerate(dict.fromkeys(row.case for row in mine)):
            own = [row for row in mine if row.case == case and row.impl != "chosen"]
            plain = own[0].value or 0.0
            at = [row.params["budget"] / MB for row in own]
            ax.plot(at, [plain - (row.value or 0.0) for row in own], f"C{color}", label=case)
            told = [row.params["predicted_saved_us"] for row in own]
            ax.plot(at, told, f"C{color}--", lw=0.8)
        ax.set(title=name, xlabel="MB asked for", ylabel="us saved")
        ax.legend(fontsize=6)
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


def chip_of(device: torch.device, bandwidth: float) -> Accelerator:
    """The model's accelerator, with the measured bandwidth."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = next((chip for chip in ("H100", "H200", "B200") if chip in name), H200.name)
    return replace(accelerator_named(known), memory_bandwidth=bandwidth)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer budgets, short measurements")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on the CPU")
    parser.add_argument("--sms", type=int, default=8, help="CTAs of a prefetch")
    parser.add_argument("--once", type=int, metavar="MB", help="one step, for ncu")
    given = argv if argv is None or "--tiny" not in argv else [*argv, "--device", "cpu"]
    options = placed(parser, given)
    device = options.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if options.once is not None:
        run_once(device, options.once, options.sms)
        return
    effort = QUICK if options.quick or options.tiny else Effort()
    chip = chip_of(device, read_bandwidth(device, effort))
    report = Report("prefetch", device, options.out)
    bench = Bench(device, effort, chip, options.sms)
    durations, budgets = (SECONDS[1::2], BUDGETS[1::3]) if options.quick else (SECONDS, BUDGETS)
    for name, make in readers(device, options.tiny):
        first = make()
        copies = copies_needed(Case(name, 0, "us", first.bytes), device)
        inputs = [first, *(make() for _ in range(copies - 1))]
        for row in bench.rows(inputs, durations, budgets):
            report.add(row)
    report.console.print(summary(report.rows))
    draw(report.rows, options.out / "prefetch.png")


if __name__ == "__main__":
    main()
