"""Mixed batches, a prefill chunk and decodes, beside two kernels in turn and fused ones of peers.

    python benchmarks/mixed.py [--tables mixed mixed_pure] [--drawn N] [--quick] [--limit SECONDS]
                               [--only "one plan,two in turn"] [--device cpu --tiny]

bf16, heads of 128 but where it is said, pages of 16; figures are microseconds of one layer. Rows of
ours: "one plan" is one wrapper that plans the whole batch and chooses roles by itself, "one tile"
the same without roles, "two roles" always with them, "two in turn" and "two streams" a wrapper for
each kind of request, "... alone" each half, which bounds all others. Of a row with several ways
(`kept` in its params) the fastest counts.
"mixed" has twelve batches with goals, "mixed_drawn" N of drawn sizes, "mixed_light" N with few
decodes or a short chunk, and "mixed_lanes" drawn ones of other head sizes (N of the first, a third
of the others), both by ways of warploom alone, "mixed_pure" batches
of one kind through a wrapper that has planned a mixed one, "mixed_fp8" the twelve over a cache of 8
bits, without peers, and with a portable tile; "mixed_captured" has batches of any kind through
wrappers for CUDA graphs. A run that its limit ends keeps what it has.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mixed_captured
import mixed_goals
import mixed_ours
import peers_mixed
import torch
from batches import Shape, Truth, label, make_inputs
from harness import (
    QUICK,
    Case,
    Check,
    Effort,
    Implementation,
    Report,
    Row,
    copies_needed,
    placed,
    time_one,
)
from mixed_batches import (
    CHUNKS,
    CONTEXTS,
    DECODES,
    KINDS,
    Batch,
    cases,
    check_of,
    drawn_batches,
    light_batches,
    make_mixed,
    table_batches,
)
from narrow_caches import E4M3
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tables import measured_ceiling

CEILINGS = ("matmul", "copy", "read")
TABLES = ("mixed", "mixed_drawn", "mixed_light", "mixed_lanes", "mixed_pure", "mixed_fp8",
          "mixed_captured")  # fmt: skip
DRAWN = 24
LANES = (64, 96)  # of heads, the most common first

Ways = dict[str, list[Implementation]]


@dataclass(frozen=True)
class Trial:
    """A case and its rows.

    Attributes:
        case: name and sizes.
        make: makes one set of inputs.
        check: the truth for one.
        ways: row -> contestants, of which the fastest counts.
        told: row -> what is kept beside its figure, asked for after it was timed.
    """

    case: Case
    make: Callable[[torch.device], Any]
    check: Callable[[Any], Check]
    ways: Ways
    told: dict[str, Callable[[Any], dict[str, Any]]]


def mixed_trial(batch: Batch, on_gpu: bool) -> Trial:
    """The batch by ways of warploom and of its peers."""
    kind, (q_heads, kv_heads) = KINDS[batch.kind], batch.heads
    own = own_trial(batch, on_gpu)
    peers = peers_mixed.serial_ways(kind, q_heads // kv_heads) | peers_mixed.fused_ways(kind)
    return replace(own, ways=own.ways | peers)


def own_trial(batch: Batch, on_gpu: bool) -> Trial:
    kind = KINDS[batch.kind]
    told = {mixed_goals.ONE_PLAN: partial(mixed_ours.facts_of_plan, kind)}
    ways = mixed_ours.ways(kind, on_gpu)
    return Trial(batch.case, partial(make_mixed, batch), check_of(batch), ways, told)


def narrow_trial(batch: Batch, on_gpu: bool) -> Trial:
    """The batch over a cache of 8 bits, by ways of warploom."""
    own = own_trial(replace(batch, kv_dtype=E4M3), on_gpu)
    portable = mixed_ours.portable_ways(KINDS[batch.kind], on_gpu)
    return replace(own, ways=own.ways | portable)


# whose batches are drawn, and which have no peers
DRAWN_TABLES = {
    "mixed_drawn": drawn_batches, "mixed_light": light_batches, "mixed_lanes": drawn_batches,
}  # fmt: skip
OWN_TRIALS = {"mixed_light": own_trial, "mixed_lanes": own_trial, "mixed_fp8": narrow_trial}


def pure_trials(small: bool) -> Iterator[Trial]:
    """Chunks alone and decodes alone; the wrapper has planned a small mixed batch before."""
    scale, heads, dim = (64, (4, 2), 64) if small else (1, (32, 8), 128)
    for context in CONTEXTS:
        keys = context // scale
        rows = {f"chunk {label(n)}/{label(context)}": (n // scale,) for n in CHUNKS}
        counts = {f"{n} x {label(context)}": n // 32 if small else n for n in DECODES}
        rows |= {name: (1,) * count for name, count in counts.items()}
        for name, q_lens in rows.items():
            sizes = *heads, dim, torch.bfloat16, 16
            shape = Shape(q_lens, (keys,) * len(q_lens), *sizes)
            yield pure_trial(name, shape, Shape((256 // scale, 1, 1), (keys,) * 3, *sizes))


def pure_trial(name: str, shape: Shape, before: Shape) -> Trial:
    kind = KINDS["causal"]

    def after_mixed(inputs: Sequence[Any]) -> Any:
        mixed = make_inputs(before, inputs[0].q.device)
        return mixed_ours.run_after_mixed(kind, mixed, inputs)

    one_plan = Implementation(mixed_goals.ONE_PLAN, after_mixed)
    one_tile = Implementation(mixed_goals.ONE_TILE, partial(mixed_ours.run_pure, kind))
    ways = {one.name: [one] for one in (one_plan, one_tile)}
    case = Case(name, 0.0, "us", shape.bytes, shape.describe())
    return Trial(case, partial(make_inputs, shape), Truth().check, ways, {})


def captured_trials(small: bool, on_gpu: bool) -> Iterator[Trial]:
    kind = KINDS["causal"]
    for name, shape in mixed_captured.shapes(small).items():
        case = Case(name, 0.0, "us", shape.bytes, shape.describe())
        ways = mixed_captured.ways(kind, on_gpu)
        yield Trial(case, partial(make_inputs, shape), Truth().check, ways, {})


def with_lanes(batches: Sequence[Batch], dim: int) -> list[Batch]:
    """The same batches with heads of so many lanes: of all but the first size a third of them."""
    kept = batches if dim == LANES[0] else batches[: -(-len(batches) // 3)]
    return [replace(one, name=f"{one.name}, {dim} lanes", dim=dim) for one in kept]


def trials_of(table: str, options: argparse.Namespace) -> list[Trial]:
    on_gpu = options.device.type == "cuda"
    small = options.tiny or not on_gpu
    if table == "mixed_pure":
        trials = list(pure_trials(small))
        return trials[::4] if options.quick else trials
    if table == "mixed_captured":
        trials = list(captured_trials(small, on_gpu))
        return trials[::4] if options.quick else trials
    drawn = DRAWN_TABLES.get(table)
    batches = cases(drawn(options.drawn) if drawn else table_batches(), small)
    if table == "mixed_lanes":
        batches = [one for dim in LANES for one in with_lanes(batches, dim)]
    if options.quick and not drawn:
        batches = batches[::4]
    trial = OWN_TRIALS.get(table, mixed_trial)
    return [trial(batch, on_gpu) for batch in batches]


def fastest(name: str, rows: Sequence[Row]) -> Row:
    """The row of the fastest way under one name, or the reason of the first that has no figure."""
    best = min(rows, key=lambda row: float("inf") if row.ms is None else row.ms)
    if len(rows) == 1:
        return replace(best, impl=name)
    kept = {"kept": best.impl} if best.value is not None else {}
    return replace(best, impl=name, params={**best.params, **kept})


def wanted_rows(ways: Ways, only: str) -> Ways:
    names = [name.strip() for name in only.split(",") if name.strip()]
    return {row: found for row, found in ways.items() if not names or row in names}


class Run:
    """One table that is being measured, until the clock reaches `end`."""

    def __init__(self, table: str, options: argparse.Namespace, end: float) -> None:
        self.table, self.device, self.only, self.end = table, options.device, options.only, end
        self.effort = QUICK if options.quick or options.tiny else Effort()
        self.trials = trials_of(table, options)
        self.report = Report(table, self.device, options.out)

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def measure(self) -> None:
        for name in CEILINGS:
            ceiling = measured_ceiling(name, self.device, self.effort)
            self.report.add(replace(ceiling, benchmark=self.table))
        columns = (TextColumn("timing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TextColumn("{task.description}"))  # fmt: skip
        total = sum(len(wanted_rows(trial.ways, self.only)) for trial in self.trials)
        with Progress(*columns, console=self.report.console) as bar:
            task = bar.add_task("", total=total)
            for trial in self.trials:
                if self.over:
                    bar.console.print("the limit ended the run")
                    break
                bar.update(task, description=trial.case.name)
                self.time_case(trial, partial(bar.advance, task))
                gc.collect()  # graphs and workspaces of peers, before the next batch is made
                torch.cuda.empty_cache()
        self.report.finish()
        summary = mixed_goals.SUMMARIES[self.table](self.report.rows)
        told = "\n".join(summary)
        self.report.console.print(told, markup=False, highlight=False, soft_wrap=True)

    def time_case(self, trial: Trial, advance: Callable[[], None]) -> None:
        torch.manual_seed(0)
        copies = copies_needed(trial.case, self.device)
        inputs = [trial.make(self.device) for _ in range(copies)]
        check = trial.check(inputs[0])
        for name, ways in wanted_rows(trial.ways, self.only).items():
            if self.over:
                return
            timed = [
                time_one(self.table, trial.case, way, inputs, check, self.effort, self.device)
                for way in ways
            ]
            row = fastest(name, timed)
            if row.value is not None and name in trial.told:
                told = trial.told[name](inputs[0])
                row = replace(row, params={**row.params, **told})
            self.report.add(row)
            if "way" in row.params:
                self.report.console.print(f"    {row.params['way']}", highlight=False)
            advance()


def main(argv: Sequence[str] | None = None) -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--drawn", type=int, default=DRAWN, help="batches of mixed_drawn")
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter measurements")
    parser.add_argument("--only", default="", help='comma-separated rows, e.g. "one plan"')
    parser.add_argument("--limit", type=float, default=540.0, help="seconds, compiling included")
    parser.add_argument("--tiny", action="store_true", help="small batches, as a CPU always has")
    options = placed(parser, argv)
    for table in options.tables:
        if table == "mixed_drawn" and options.drawn < 1:
            continue
        Run(table, options, begin + options.limit).measure()


if __name__ == "__main__":
    main()
