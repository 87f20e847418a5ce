"""Prefetching beside a stand-in for a collective: the step of a layer, by bytes that are asked for.

    python benchmarks/prefetch.py [--quick] [--tiny] [--readers 8B] [--sms 8] [--captures 5]
                                  [--out FOLDER]
    python benchmarks/fit_prefetch.py FOLDER/prefetch.jsonl [FILE ...]

A kernel holds some SMs for 5 to 40 us, as a collective would, while weights (a GEMV of 8B's or of
70B's layers on eight devices) or pages of keys (a decoding step) are prefetched on a side stream;
then they are read. A figure is the time of all that in a CUDA graph that goes over copies of the
inputs, so that L2 is cold. Each comes from several graphs, captured anew after all other steps of
the reader, since one graph in ten is off by half a microsecond and more, in all of its replays.
Beside each stands what the paper's model predicts, from the bandwidth that reading has in the same
run. Some budgets are asked for by 16 and 32 CTAs, too; for one reader all of them, and some beside
a stand-in that holds fewer or more SMs.

Then what is chosen is run, for all cases: by the constants of `warploom.prefetch` for this GPU (of
another, by those that half of the cases of this run fit), and with each reader's own constant,
which comes from half of its cases. `--readers` takes some of the readers, by the beginnings of
their names, so that a run fits ten minutes ("8B" and "70B" are two such); `fit_prefetch.py` joins
the files. `prefetch_hits.py` counts the hits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fit_prefetch import (
    COLLECTIVE_SMS,
    Models,
    checked_fit,
    chip_of,
    fit_table,
    for_all,
    for_each,
    halves,
    overlap_of,
    reader_of,
    timed_rows,
    told,
    usual,
)
from harness import QUICK, Case, Effort, Report, Row, copies_needed, placed, replay_times
from prefetch_readers import Reader, readers, step
from rich.table import Table
from stand_in import StandIn

from warploom.prefetch import Accelerator, SafeBudget, predict

SECONDS = (5e-6, 10e-6, 20e-6, 40e-6)
BUDGETS = (2, 4, 8, 12, 16, 24, 32, 40, 50, 60)  # MB; the last are all of an H200's L2
MORE_SMS = (16, 32)
OTHER_COLLECTIVES = (4, 32)  # SMs of the stand-in
SWEPT = "70B/TP8 gate, up", "tiny"  # readers that are measured with all of that
TINY_BUDGETS = (0.016, 0.03)
FEW = (0.016, 8, 16, 24, 32)  # of the budgets, where others than the usual SMs ask or are held
NORMAL = Effort(seconds=0.1)
MB = 10**6
CHOSEN = "chosen", "chosen, own"  # by the GPU's constants, and with the reader's own


@dataclass(frozen=True)
class Setting:
    """How a step is run; a budget of 0 is no prefetch, and `held` are the stand-in's SMs."""

    seconds: float
    budget: int
    impl: str
    sms: int
    held: int = COLLECTIVE_SMS


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
        stand_ins = {at.held: StandIn(self.device, at.held) for at in settings}
        times: list[list[float]] = [[] for _ in settings]
        for _ in range(self.captures):
            for at, mine in zip(settings, times, strict=True):
                given = at.seconds, at.budget, at.sms
                thunks = [partial(step, stand_ins[at.held], one, *given) for one in copies]
                mine += replay_times(thunks, self.device, self.effort)
        for at, mine in zip(settings, times, strict=True):
            yield self.row(copies, at, sorted(mine))

    def row(self, copies: list[Reader], at: Setting, times: list[float]) -> Row:
        """A step's median, with what the paper's model predicts in `params`."""
        first, ms = copies[0], times[len(times) // 2]
        by_paper = predict(self.chip, at.seconds, first.bytes, at.budget)
        params = {
            "collective_us": 1e6 * at.seconds, "budget": at.budget, "bytes": first.bytes,
            "sms": at.sms, "collective_sms": at.held, "captures": self.captures,
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
        given = [n for n in budgets if first.least <= n * MB < 1.2 * first.bytes]
        settings: list[Setting] = []
        for seconds in durations:
            settings.append(Setting(seconds, 0, "none", self.sms))
            settings += self._asked(seconds, given, self.sms)
            few = [n for n in given if n in FEW]
            for sms in MORE_SMS:
                more = given if first.name in SWEPT else few
                settings += self._asked(seconds, more, sms, f", {sms} CTAs")
            for held in OTHER_COLLECTIVES if first.name in SWEPT else ():
                beside = f", beside {held} SMs"
                settings.append(Setting(seconds, 0, f"none{beside}", self.sms, held))
                settings += self._asked(seconds, few, self.sms, beside, held)
        yield from self.timed(copies, settings)

    def _asked(
        self, seconds: float, given: Sequence[float], sms: int, how: str = "",
        held: int = COLLECTIVE_SMS,
    ) -> list[Setting]:  # fmt: skip
        return [Setting(seconds, round(n * MB), f"{n:g} MB{how}", sms, held) for n in given]

    def chosen(
        self, models: Mapping[str, Models], copies: list[Reader], durations: Any
    ) -> Iterator[Row]:
        """Steps with the bytes and CTAs that each kind of models chooses, beside one without."""
        first = copies[0]
        settings, saved = [], []
        for seconds in durations:
            settings.append(Setting(seconds, 0, "none again", self.sms))
            saved.append(0.0)
            for impl, fitted in models.items():
                model = fitted[first.name]
                budget, sms = SafeBudget(model, seconds).best(first.bytes)
                budget = budget if budget >= first.least else 0
                settings.append(Setting(seconds, budget, impl, sms))
                saved.append(model.saved(seconds, first.bytes, budget, sms))
        for at, row, seconds in zip(settings, self.timed(copies, settings), saved, strict=True):
            fitted_saved = {"fitted_saved_us": 1e6 * seconds} if at.impl in models else {}
            yield replace(row, params={**row.params, **fitted_saved})


def read_bandwidth(device: torch.device, effort: Effort) -> float:
    """Bytes a second of a sum over more than L2 holds."""
    x = torch.ones(1 << 18 if device.type == "cpu" else 1 << 28, device=device)
    ms = sorted(replay_times([x.sum], device, effort))[0]
    return x.numel() * x.element_size() / (1e-3 * ms)


def summary(rows: list[Row]) -> Table:
    """Time saved with the best budget, and with the chosen ones as their constants predict it."""
    table = Table("step", "none", "best", "saved", title="us")
    for name in CHOSEN:
        for column in (name, "saved", "told"):
            table.add_column(column)
    steps = usual(rows)
    for case in dict.fromkeys(row.case for row in steps):
        mine = {row.impl: row for row in steps if row.case == case}
        plain, again = mine["none"], mine["none again"]
        given = [row for name, row in mine.items() if name not in ("none again", *CHOSEN)]
        best = min(given, key=lambda row: row.value or float("inf"))
        cells = [f"{plain.value:.1f}", best.impl, f"{_saved(plain, best):.1f}"]
        for row in (mine[name] for name in CHOSEN):
            at = row.params
            cells.append(f"{at['budget'] / MB:.1f} MB, {at['sms']} CTAs" if at["budget"] else "no")
            cells += [f"{_saved(again, row):.1f}", f"{at['fitted_saved_us']:.1f}"]
        table.add_row(case, *cells)
    return table


def collective_table(rows: list[Row]) -> Table:
    """Microseconds saved by SMs that the stand-in holds, each beside a step without a prefetch."""
    table = Table("step", "SMs held", "none", title="us saved beside other stand-ins")
    cases = {row.case for row in rows if row.params["collective_sms"] != COLLECTIVE_SMS}
    swept = [row for row in rows if row.case in cases]
    columns = [f"{n:g} MB" for n in FEW]
    for name in columns:
        table.add_column(name)
    for case in dict.fromkeys(row.case for row in swept):
        for held in sorted({row.params["collective_sms"] for row in swept}):
            how = "" if held == COLLECTIVE_SMS else f", beside {held} SMs"
            mine = {row.impl: row for row in swept if row.case == case}
            plain = mine[f"none{how}"]
            found = (mine.get(f"{name}{how}") for name in columns)
            cells = (f"{_saved(plain, row):.1f}" if row else "" for row in found)
            table.add_row(case, str(held), f"{plain.value:.1f}", *cells)
    return table


def _saved(without: Row, row: Row) -> float:
    return (without.value or 0.0) - (row.value or 0.0)


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


def models_of(rows: list[Row], chip: Accelerator, name: str) -> dict[str, Models]:
    """The GPU's constants, recorded or else fitted to half of the cases, and each reader's own."""
    model = overlap_of(name) or checked_fit(rows, chip)[0]
    timed = timed_rows(rows)
    every, each = CHOSEN
    return {every: for_all(model, timed), each: for_each(model, halves(timed)[0])}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer budgets, short measurements")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on the CPU")
    parser.add_argument("--sms", type=int, default=8, help="CTAs of a prefetch")
    parser.add_argument("--captures", type=int, default=5, help="graphs for each figure")
    parser.add_argument("--readers", nargs="+", default=[""], help="beginnings of their names")
    given = sys.argv[1:] if argv is None else argv
    options = placed(parser, [*given, "--device", "cpu"] if "--tiny" in given else given)
    device = options.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    effort = QUICK if options.quick or options.tiny else NORMAL
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    chip = chip_of(gpu, read_bandwidth(device, effort))
    report = Report("prefetch", device, options.out)
    bench = Bench(device, effort, chip, options.sms, options.captures)
    durations = SECONDS[1::2] if options.quick else SECONDS
    budgets = TINY_BUDGETS if options.tiny else BUDGETS[1::3] if options.quick else BUDGETS
    kept = []  # all readers, for the budgets that are chosen at the end
    for name, make in readers(device, options.tiny):
        if not name.startswith(tuple(options.readers)):
            continue
        first = make()
        copies = copies_needed(Case(name, 0, "us", first.bytes), device)
        kept.append([first, *(make() for _ in range(copies - 1))])
        for row in bench.rows(kept[-1], durations, budgets):
            report.add(row)
    if not kept:
        parser.error(f"no reader begins with {' or '.join(options.readers)}")
    models = models_of(report.rows, chip, gpu)
    for inputs in kept:
        for row in bench.chosen(models, inputs, durations):
            report.add(row)
    model, *found = checked_fit(report.rows, chip)  # steps without a prefetch were run again
    report.console.print(summary(report.rows))
    report.console.print(collective_table(report.rows))
    report.console.print(fit_table(model, *found))
    report.console.print(repr(model))
    fitted = for_each(model, halves(timed_rows(report.rows))[0])
    draw(report.rows, fitted, options.out / "prefetch.png")


if __name__ == "__main__":
    main()
