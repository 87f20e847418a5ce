"""What full overlap would gain over two wrappers in turn, by prices, and what was gained.

    python benchmarks/mixed_estimate.py [FILE]

FILE is what `mixed.py` wrote of drawn batches, with the rows "one plan" and "two in turn"; no GPU
is needed. In turn a batch takes what reading takes, and what all CTAs compute for. Overlapped in
full, memory is never waited for while there is something to compute, no CTA waits for another, and
a CTA does one of both at a time (`role_cost.forecast`). Power is not counted, nor what a launch
costs. It is an estimate, as good as its prices, and no bound: some batches gained more.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fit_roles import CTAS, counted
from harness import RESULTS, Row, load_rows, pivot
from mixed_batches import Batch, drawn_batch
from mixed_goals import ONE_PLAN, OWN_SERIAL, geometric_mean
from rich.console import Console
from rich.table import Table

from warploom.codegen.choice.role_cost import SHIPPED, forecast

_AS_MEMORY = SHIPPED._replace(longer=10**9)  # decodes take what memory does, and no longer
MUCH = 1.05  # times an estimate


@dataclass(frozen=True)
class Gain:
    """Times as fast as two wrappers in turn.

    Attributes:
        batch: of which.
        estimate: by prices, if both halves overlapped in full.
        got: as measured.
    """

    batch: Batch
    estimate: float
    got: float

    @property
    def kind(self) -> str:
        """By which gains are averaged."""
        heads = "/".join(map(str, self.batch.heads))
        return f"{heads}, windows" if "window" in self.batch.kind else heads


def estimate_of(batch: Batch) -> float:
    """How many times as fast full overlap would be."""
    cost, prefills, decodes = counted(batch)
    of_two = replace(cost, decode_in_tall=0)  # two wrappers have a tile for decodes
    expected = forecast(of_two, prefills, decodes, CTAS, _AS_MEMORY)
    return expected.in_turn / expected.at_once


def gains(rows: Sequence[Row]) -> list[Gain]:
    """Of each drawn batch that has both rows."""
    cases, _, at = pivot(rows)
    found = []
    for case in cases:
        ours, turns = at.get((case, ONE_PLAN)), at.get((case, OWN_SERIAL))
        if ours is None or turns is None or not ours.ms or not turns.ms:
            continue
        batch = drawn_batch(int(case.partition(":")[0]))
        found.append(Gain(batch, estimate_of(batch), turns.ms / ours.ms))
    return found


def means(found: Iterable[Gain]) -> tuple[float, float]:
    """Geometric means of estimates and of what was gained."""
    both = [(one.estimate, one.got) for one in found]
    estimate, got = (geometric_mean(column) for column in zip(*both, strict=True))
    return estimate, got


def passed(found: Iterable[Gain], by: float = 1.0) -> int:
    """How many batches gained more than `by` times the estimate."""
    return sum(one.got > by * one.estimate for one in found)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = RESULTS / "mixed_drawn_peers.jsonl"
    parser.add_argument("file", nargs="?", type=Path, default=default)
    file = parser.parse_args(argv).file
    found = gains(load_rows(file)[1])
    if not found:
        parser.error(f"{file} has no batch with the rows {ONE_PLAN!r} and {OWN_SERIAL!r}")
    groups = defaultdict(list)
    for one in found:
        groups[one.kind].append(one)
    title = f"{file.name}, {CTAS} CTAs"
    columns = "estimate", "got", "got more", f"by more than {MUCH - 1:.0%}"
    table = Table("heads", "batches", *columns, title=title)
    for name, some in [*sorted(groups.items()), ("all", found)]:
        figures = (f"{mean:.3f}" for mean in means(some))
        table.add_row(name, str(len(some)), *figures, str(passed(some)), str(passed(some, MUCH)))
    Console().print(table)
    most = max(found, key=lambda one: one.got / one.estimate)
    Console().print(
        f"Furthest above: {most.batch.name}, estimate {most.estimate:.3f}, got {most.got:.3f}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
