"""Tables: named lists of trials, each timed with its contestants, written and drawn by name."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from batches import Inputs, Shape, Truth, make_inputs
from harness import (
    QUICK,
    Case,
    Check,
    Effort,
    Implementation,
    Report,
    Row,
    arguments,
    chosen,
    copies_needed,
    copy_ceiling,
    matmul_ceiling,
    read_ceiling,
    time_one,
)

Ceiling = Callable[[str, torch.device, Effort], Row]
CEILINGS: dict[str, Ceiling] = {
    "matmul": matmul_ceiling, "copy": copy_ceiling, "read": read_ceiling
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One row of a table.

    Attributes:
        case: its name, unit and work.
        make: makes one set of inputs on a device.
        check: the truth for a set of inputs.
        implementations: the contestants.
    """

    case: Case
    make: Callable[[torch.device], Any]
    check: Callable[[Any], Check]
    implementations: Sequence[Implementation]


@dataclass(frozen=True)
class Setting:
    """What trials may depend on: whether there is a GPU, and whether only a look is wanted."""

    on_gpu: bool
    quick: bool

    def pick(self, all_of: Sequence[Any], on_cpu: Any) -> Sequence[Any]:
        """All on a GPU, the first and the last for a look, one small one on a CPU."""
        if not self.on_gpu:
            return (on_cpu,)
        return (all_of[0], all_of[-1]) if self.quick and len(all_of) > 2 else all_of


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: of its file in `results`.
        trials: makes its rows.
        ceilings: keys of CEILINGS that it is read beside.
        bound: adds, to each trial, the rate at which the ceilings would let it end.
    """

    name: str
    trials: Callable[[Setting], Iterable[Trial]]
    ceilings: tuple[str, ...] = ()
    bound: bool = field(default=False, kw_only=True)


def attention_trial(
    name: str,
    shape: Shape,
    implementations: Sequence[Implementation],
    *,
    unit: str,
    truth: Truth | None = None,
    flops: int | None = None,
) -> Trial:
    """A trial of attention over one batch; `unit` decides what counts as work.

    Args:
        name: of the row.
        shape: the batch.
        implementations: the contestants; each takes `Inputs`.
        unit: "TFLOP/s", "GB/s" or "us".
        truth: the check; plain causal attention by default.
        flops: operations on visible pairs; those of causal attention by default.
    """
    flops = shape.flops() if flops is None else flops
    work = {"TFLOP/s": flops / 1e12, "GB/s": shape.bytes / 1e9, "us": 0.0}[unit]
    params = {**shape.describe(), "flops": flops, "bytes": shape.bytes}
    truth = truth or Truth()

    def make(device: torch.device) -> Inputs:
        return make_inputs(shape, device)

    return Trial(Case(name, work, unit, shape.bytes, params), make, truth.check, implementations)


@lru_cache(maxsize=len(CEILINGS))
def measured_ceiling(name: str, device: torch.device, effort: Effort) -> Row:
    """A ceiling of this run; large tensors, so once a process."""
    row = CEILINGS[name]("", device, effort)
    torch.cuda.empty_cache()
    return row


def run_table(table: Table, options: Any) -> None:
    """Measure a table and write its rows."""
    device: torch.device = options.device
    effort = QUICK if options.quick else Effort()
    report = Report(table.name, device, options.out)
    ceilings = {name: measured_ceiling(name, device, effort) for name in table.ceilings}
    for row in ceilings.values():
        report.add(replace(row, benchmark=table.name))
    for trial in table.trials(Setting(device.type == "cuda", options.quick)):
        torch.manual_seed(0)
        copies = copies_needed(trial.case, device)
        inputs = [trial.make(device) for _ in range(copies)]
        check = trial.check(inputs[0])
        for implementation in chosen(trial.implementations, options.only):
            report.add(
                time_one(table.name, trial.case, implementation, inputs, check, effort, device)
            )
        if table.bound:
            report.add(bound_row(table.name, trial.case, ceilings))
        del inputs, check
        gc.collect()  # graphs and workspaces of peers, before the next batch is made
        torch.cuda.empty_cache()
    report.finish()


def bound_row(benchmark: str, case: Case, ceilings: dict[str, Row]) -> Row:
    """How fast the case would be at the ceiling that binds it."""
    times = {
        name: case.params[counted] / scale / (ceilings[name].value or 1.0)
        for name, counted, scale in (("matmul", "flops", 1e12), ("copy", "bytes", 1e9))
    }
    binding = max(times, key=lambda name: times[name])
    value = case.work / times[binding] if case.work else times[binding] * 1e6
    row = Row(benchmark, case.name, "bound", round(value, 1), case.unit, params=case.params)
    return Row(**{**asdict(row), "note": f"{case.name}: {binding} binds"})


def main(tables: Sequence[Table], description: str, argv: Sequence[str] | None = None) -> None:
    """Run the tables that the command line names; all by default."""
    options = arguments(description, argv, [table.name for table in tables])
    for table in tables:
        if table.name in options.tables:
            run_table(table, options)
