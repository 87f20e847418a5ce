"""What a prefetch of a weight saves if its lines are marked as the last to be evicted, and if not.

    python benchmarks/prefetch_marks.py [--tiny] [--readers 8B] [--sms 16] [--captures 4]
                                        [--out FOLDER]

Steps are those of `prefetch.py`: a stand-in for a collective, a prefetch beside it, and a product,
in a CUDA graph over sixteen copies of the weight, of which the smallest budget alone asks for twice
what L2 holds: marked lines of few copies would still be there when their turn comes again, as they
are not in a model of many layers. Each figure is the median of several graphs; these are
captured by turns of all marks and budgets behind one duration, with a step without a prefetch at
the begin and the end of each turn. What the product makes is compared, bit by bit, with what it
makes without a prefetch, when a graph is replayed, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from harness import QUICK, Case, Check, Effort, Report, Row, copies_needed, placed, replay_times
from prefetch import read_bandwidth
from prefetch_readers import MARKS, Reader, by_marks, step, weights
from rich.table import Table
from stand_in import StandIn

NAME = "prefetch_marks"
READERS = "8B gate, up", "70B/TP8 gate, up", "8B qkv", "70B/TP8 down", "tiny"
SECONDS, BUDGETS = (10e-6, 20e-6, 40e-6), (8, 16, 24, 30)  # MB
TINY_BUDGETS = (0.016,)
COLLECTIVE_SMS = 16
EFFORT = Effort(seconds=0.05)
MB = 10**6
NONE = "none", ""

Way = tuple[str, str]  # a budget's name, and a mark


@dataclass(frozen=True)
class Bench:
    """One run: where, how carefully, by how many CTAs, and from how many graphs a figure comes.

    `bandwidth` is that of memory, as a sum finds it in the same run.
    """

    device: torch.device
    effort: Effort
    sms: int
    captures: int
    bandwidth: float

    def rows(
        self, copies: Sequence[Mapping[str, Reader]], seconds: float, budgets: Sequence[float]
    ) -> Iterator[Row]:
        """A step without a prefetch, and one for each budget and mark, behind one duration."""
        stand_in = StandIn(self.device, COLLECTIVE_SMS)
        expected = copies[0]["plain"].read().clone()
        check = Check(partial(_difference, expected), 0.0)
        ways: list[tuple[Way, int]] = [
            ((f"{mb:g} MB", mark), round(mb * MB)) for mb in budgets for mark in MARKS
        ]
        turn = [(NONE, 0), *ways, (NONE, 0)]
        errors: dict[Way, float] = {}
        times: dict[Way, list[float]] = {}
        for _ in range(self.captures):
            for way, budget in turn:
                given = seconds, budget, self.sms
                thunks = [partial(step, stand_in, x[way[1] or "plain"], *given) for x in copies]
                errors[way] = max(errors.get(way, 0.0), check.relative_error(thunks[0]()))
                ms = replay_times(thunks, self.device, self.effort, check=check)
                times.setdefault(way, []).append(1e3 * median(ms))
        for way, budget in turn[:-1]:
            first, us = copies[0][way[1] or "plain"], median(times[way])
            params = {
                "collective_us": 1e6 * seconds, "bytes": first.bytes,
                "keep": MARKS[way[1] or "plain"],
                **self.asked(first, budget), "saved_us": round(median(times[NONE]) - us, 3),
                "captures_us": [round(one, 3) for one in times[way]],
            }  # fmt: skip
            yield Row(
                NAME, f"{first.name}, {1e6 * seconds:.0f} us", ", ".join(filter(None, way)),
                None if errors[way] else round(us, 3), "us", us / 1e3, min(times[way]) / 1e3,
                max(times[way]) / 1e3, len(times[way]), len(copies), errors[way],
                "wrong: another result with a prefetch" if errors[way] else "", params,
            )  # fmt: skip

    def asked(self, reader: Reader, budget: int) -> dict[str, object]:
        """What stands in a row of a prefetch: who asks, beside whom, and for how many bytes."""
        with reader.fetch(budget, self.sms) if budget else nullcontext(0) as asked:
            return {
                "sms": self.sms, "collective_sms": COLLECTIVE_SMS, "bandwidth": self.bandwidth,
                "budget": budget, "asked": int(asked),
            }  # fmt: skip


def _difference(expected: torch.Tensor, output: object) -> float:
    """0 where all bits agree."""
    assert isinstance(output, torch.Tensor)
    if torch.equal(output, expected):
        return 0.0
    return float((output.double() - expected.double()).abs().max().nan_to_num(torch.inf))


def saved_table(rows: Sequence[Row]) -> Table:
    """Microseconds saved by case, budget and mark; the better of each line in bold."""
    table = Table("step", "budget", *MARKS, title="us saved")
    asked = [row for row in rows if row.params["budget"]]
    for case, budget in dict.fromkeys((x.case, x.params["budget"]) for x in asked):
        own = [x for x in asked if (x.case, x.params["budget"]) == (case, budget)]
        saved = {x.params["keep"]: x.params["saved_us"] for x in own}
        best = max(saved.values())
        cells = (f"{saved[keep]:.2f}" for keep in MARKS.values())
        shown = [f"[bold]{x}[/bold]" if x == f"{best:.2f}" else x for x in cells]
        table.add_row(case, f"{budget / MB:g} MB", *shown)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes, on the CPU")
    parser.add_argument("--sms", type=int, default=16, help="CTAs of a prefetch")
    parser.add_argument("--captures", type=int, default=4, help="graphs for each figure")
    parser.add_argument("--readers", nargs="+", default=[""], help="beginnings of their names")
    given = list(sys.argv[1:] if argv is None else argv)
    options = placed(parser, [*given, "--device", "cpu"] if "--tiny" in given else given)
    device = options.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    effort = QUICK if options.tiny else EFFORT
    bandwidth = read_bandwidth(device, effort)
    bench = Bench(device, effort, options.sms, options.captures, bandwidth)
    report = Report(NAME, device, options.out)
    budgets = TINY_BUDGETS if options.tiny else BUDGETS
    for name, outputs, inputs in weights(options.tiny):
        if name not in READERS or not name.startswith(tuple(options.readers)):
            continue
        first = by_marks(name, outputs, inputs, device)
        more = copies_needed(Case(name, 0, "us", round(min(budgets) * MB)), device) - 1
        copies = [first, *(by_marks(name, outputs, inputs, device) for _ in range(more))]
        for seconds in SECONDS:
            for row in bench.rows(copies, seconds, budgets):
                report.add(row)
    if not report.rows:
        parser.error(f"no reader begins with {' or '.join(options.readers)}")
    report.console.print(saved_table(report.rows))


if __name__ == "__main__":
    main()
