"""Fit what a reader finds of prefetched bytes, by the order in which they were asked for.

    python benchmarks/fit_found.py [FILE]

FILE is what `prefetch_hits.py` wrote. Two constants of `Overlap` are fitted to the
reader with the most bytes: how much it reads until unread lines are driven out (`streamed`), and
how many marked lines stay (`marked`). Prints both, and beside each count what the constants tell;
readers of other sizes were left out of the fit. `fit_prefetch.py --hits` takes them from here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from pathlib import Path

import numpy as np
from harness import RESULTS, Row, load_rows
from prefetch_readers import ORDERS
from rich.console import Console
from rich.table import Table

from warploom.prefetch import H200, Overlap, accelerator_named

MB = 10**6
STREAMED = np.geomspace(4 * MB, 400 * MB, 93)  # 5 % from one to the next
MARKED = np.arange(0, 61 * MB, MB / 2)


@dataclass(frozen=True)
class Counted:
    """Hits that a prefetch has added, in bytes, of those that it asked for."""

    case: str
    size: float
    asked: float
    hits: float
    ordered: bool
    keep: bool

    def told(self, model: Overlap) -> float:
        return model.found(self.asked, self.size, self.ordered, self.keep)


def counted_rows(rows: Sequence[Row]) -> list[Counted]:
    """Products whose weights were asked for in a known order."""
    return [
        Counted(row.case, at["bytes"], at["asked"], row.value * at["asked"] / 100,
                *ORDERS[at["order"]])
        for row in rows if (at := row.params)["asked"] and at.get("order") and row.value is not None
    ]  # fmt: skip


def without_found(kept: float) -> Overlap:
    """A GPU of which nothing but L2 counts: all that is kept is found."""
    return Overlap(1.0, 0.0, 1.0, kept, 1.0, 0.0, 0.0, 0.0)


def fitted(counted: Sequence[Counted], kept: float) -> tuple[float, float]:
    """`streamed` and `marked` with the least sum of bytes by which the largest reader is off."""
    largest = max(x.size for x in counted)
    given = [x for x in counted if x.size == largest and not x.ordered]
    if not given:
        return inf, 0.0  # asked for in the reader's order alone

    def off(constants: tuple[float, float]) -> float:
        streamed, marked = constants
        model = replace(without_found(kept), streamed=streamed, marked=marked)
        return sum(abs(x.told(model) - x.hits) for x in given)

    return min(product(STREAMED.tolist(), MARKED.tolist()), key=off)


def kept_of(device: str) -> float:
    """Half of L2 of the accelerator with this in its name."""
    known = next((chip for chip in ("H100", "H200", "B200") if chip in device), H200.name)
    return accelerator_named(known).budget


def found_table(counted: Sequence[Counted], model: Overlap) -> Table:
    table = Table("reader and order", "MB asked for", "found", "told", title="MB found in L2")
    for x in counted:
        cells = (f"{n / MB:.1f}" for n in (x.asked, x.hits, x.told(model)))
        table.add_row(x.case, *cells)
    return table


def of_file(path: Path) -> tuple[float, float]:
    """`streamed` and `marked` of a GPU whose hits were recorded."""
    machine, rows = load_rows(path)
    counted = counted_rows(rows)
    if not counted:
        raise SystemExit(f"{path} has no order of a weight: record it with prefetch_hits.py")
    return fitted(counted, kept_of(machine["device"]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "prefetch_hits.jsonl")
    path = parser.parse_args(argv).file
    machine, rows = load_rows(path)
    streamed, marked = of_file(path)
    kept = kept_of(machine["device"])
    model = replace(without_found(kept), streamed=streamed, marked=marked)
    console = Console()
    console.print(found_table(counted_rows(rows), model))
    console.print(f"streamed={streamed / MB:.1f}e6, marked={marked / MB:.1f}e6", highlight=False)


if __name__ == "__main__":
    main()
