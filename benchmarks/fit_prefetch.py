"""Fit what prefetching saves to recorded steps, and say how far it is off; needs no GPU.

    python benchmarks/fit_prefetch.py [FILE]

FILE is what `prefetch.py` wrote. Half of the cases are fitted to: every other duration of every
reader, the others of its neighbour. Prints the constants for `warploom.prefetch.Overlap`, and of
the cases that were left out: the error, which the choice knows, how many savings are within 15 %,
how far a whole step's time is off, and what the choice loses at worst.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
from harness import RESULTS, Row, load_rows
from rich.console import Console
from rich.table import Table

from warploom.prefetch import Overlap, Timed
from warploom.serving.prefetch.overlap import by_case

Reals = npt.NDArray[np.float64]
MB = 10**6
STARTUPS = np.arange(0, 8.5e-6, 0.5e-6)
RATES = np.geomspace(1 / 256, 1 / 8, 21)  # of the bandwidth, for one CTA
KEPT = np.arange(12, 52, 4) * MB
_CLOSE = 0.15


def timed_rows(rows: Sequence[Row]) -> list[Timed]:
    """Steps with a budget that was given, each beside the step without one."""
    plain = {row.case: row.value for row in rows if row.impl == "none"}
    found = []
    for row in rows:
        without = plain.get(row.case)
        at = row.params
        if row.impl == "chosen" or row.value is None or without is None or not at["budget"]:
            continue
        found.append(
            Timed(
                row.case, 1e-6 * at["collective_us"], at["bytes"], min(at["budget"], at["bytes"]),
                at["sms"], 1e-6 * without, 1e-6 * row.value,
            )
        )  # fmt: skip
    return found


def halves(timed: Sequence[Timed]) -> tuple[list[Timed], list[Timed]]:
    """A checkerboard of readers and durations."""
    readers = list(dict.fromkeys(one.case.rpartition(",")[0] for one in timed))
    durations = sorted({one.collective for one in timed})

    def colour(one: Timed) -> int:
        reader = readers.index(one.case.rpartition(",")[0])
        return (reader + durations.index(one.collective)) % 2

    return [x for x in timed if not colour(x)], [x for x in timed if colour(x)]


def fit(timed: Sequence[Timed], bandwidth: float) -> Overlap:
    """The least squares of seconds saved; `error` is left 0."""
    saved = np.array([one.saved for one in timed])
    best, least = None, np.inf
    for startup, rate, kept in product(STARTUPS, RATES * bandwidth, KEPT):
        tried = Overlap(bandwidth, float(startup), float(rate), float(kept), 0.0, 0.0, 0.0, 0.0)
        parts = [tried.parts(x.collective, x.size, x.asked, x.sms) for x in timed]
        hits, late = np.array(parts).T
        found, off = positive(np.stack([hits, -late, np.full(len(timed), -1e-6)], 1), saved)
        if off < least:
            gain, lost, fork = found.tolist()
            best, least = replace(tried, gain=gain, late=lost, fork=1e-6 * fork), off
    if best is None:
        raise SystemExit("there is no step with a prefetch in this file")
    return best


def positive(columns: Reals, wanted: Reals) -> tuple[Reals, float]:
    """Factors of columns, none negative, and the sum of squares that is left."""
    scale = 1e6  # microseconds, so that squares are not lost
    best, least = np.zeros(columns.shape[1]), float(np.sum((scale * wanted) ** 2))
    for used in product((False, True), repeat=columns.shape[1]):
        mask = np.array(used)
        if not mask.any():
            continue
        part = scale * columns[:, mask]
        found = np.linalg.lstsq(part, scale * wanted, rcond=None)[0]
        off = float(np.sum((part @ found - scale * wanted) ** 2))
        if found.min() >= 0 and off < least:
            best, least = np.zeros(columns.shape[1]), off
            best[mask] = found
    return best, least


@dataclass(frozen=True)
class Quality:
    """How far a model is off recorded steps.

    Attributes:
        error: root of the mean square of seconds saved.
        close: part of the savings within 15 %, of those larger than `error`.
        step: the most by which the whole step's time is off, as a part of it.
        loss: the most by which a chosen budget lengthens a step, as a part of it.
        missed: the most by which the best recorded budget is better than the chosen one.
    """

    error: float
    close: float
    step: float
    loss: float
    missed: float


def told(model: Overlap, one: Timed) -> float:
    return model.saved(one.collective, one.size, one.asked, one.sms)


def quality(model: Overlap, timed: Sequence[Timed]) -> Quality:
    """Of all steps given; chosen budgets lie between recorded ones, and so do their times."""
    off = np.array([told(model, one) - one.saved for one in timed])
    error = float(np.sqrt(np.mean(off**2)))
    saved = np.array([one.saved for one in timed])
    large = saved > error
    close = float(np.mean(np.abs(off[large]) <= _CLOSE * saved[large])) if large.any() else 0.0
    step = float(np.max(np.abs(off) / np.array([one.seconds for one in timed])))
    losses, missed = [0.0], [0.0]
    for steps in by_case(timed).values():
        first = steps[0]
        at = model.best_bytes(first.collective, first.size, first.sms)
        asked = [0.0, *(one.asked for one in steps)]
        real = [0.0, *(one.saved for one in steps)]
        got = float(np.interp(at, asked, real))
        losses.append(-got / first.without)
        missed.append((max(real) - got) / first.without)
    return Quality(error, close, step, max(losses), max(missed))


def checked_fit(rows: Sequence[Row], bandwidth: float) -> tuple[Overlap, Quality]:
    """Fitted to one half of the cases; its error and quality are those of the other."""
    fitted_to, left_out = halves(timed_rows(rows))
    model = fit(fitted_to, bandwidth)
    model = replace(model, error=quality(model, left_out).error)
    return model, quality(model, left_out)


def fit_table(model: Overlap, found: Quality) -> Table:
    """Constants, and what is known of them."""
    table = Table("constant", "value", title="fit")
    table.add_row("bandwidth", f"{model.bandwidth / 1e12:.2f} TB/s")
    table.add_row("startup", f"{1e6 * model.startup:.1f} us")
    table.add_row("rate of one CTA", f"{model.rate / 1e9:.0f} GB/s")
    table.add_row("kept", f"{model.kept / MB:.0f} MB")
    table.add_row("gain, late", f"{model.gain:.2f}, {model.late:.2f}")
    table.add_row("fork", f"{1e6 * model.fork:.2f} us")
    table.add_row("error, of cases left out", f"{1e6 * found.error:.2f} us")
    table.add_row("savings within 15 %", f"{100 * found.close:.0f} %")
    table.add_row("a step's time is off at most", f"{100 * found.step:.1f} %")
    table.add_row("the choice loses at worst", f"{100 * found.loss:.1f} %")
    table.add_row("and misses of the best budget", f"{100 * found.missed:.1f} %")
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "prefetch.jsonl")
    options = parser.parse_args(argv)
    machine, rows = load_rows(options.file)
    bandwidth = next(row.params["bandwidth"] for row in rows if row.impl == "none")
    model, found = checked_fit(rows, bandwidth)
    console = Console()
    console.print(machine["device"], fit_table(model, found))
    console.print(repr(model))


if __name__ == "__main__":
    main()
