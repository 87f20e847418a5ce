"""What recorded steps can say of savings at all: how far the same step is off itself.

    python benchmarks/prefetch_noise.py [FILE ...]

FILEs are what `prefetch.py` wrote. A saving does not depend on the collective's duration once all
bytes come in time, so the steps of a reader with the same budget and CTAs behind different
durations are repeats, each from a graph of its own. Prints how far steps without a prefetch
are off the sum of the collective and the reader, how far repeats are off each other, how many
steps are decidable (15 % of their saving or loss is two spreads), and how many savings are within
15 % of the mean of their repeats: what a model could reach that knew each reader by heart. Beside
it stands what the fitted model reaches on the same steps, each told by the half without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fit_prefetch import (
    CLOSE,
    LARGE,
    Reals,
    alone,
    chip_of,
    fit,
    for_all,
    for_each,
    halves,
    reader_of,
    timed_rows,
    told,
    within,
)
from harness import RESULTS, Row, load_rows
from rich.console import Console
from rich.table import Table

from warploom.prefetch import Accelerator, Overlap, Timed

FILES = [RESULTS / "prefetch.jsonl", RESULTS / "prefetch_h100.jsonl"]
_NORMAL = 0.6745  # half of what is normal lies within so many spreads
_SURE = 2


def off_the_sum(rows: Sequence[Row]) -> Reals:
    """Seconds by which each step without a prefetch is off the sum of its two times."""
    readers = alone(rows)
    return 1e-6 * np.array([
        row.value - row.params["collective_us"] - readers[reader_of(row.case)]
        for row in rows if row.value is not None and not row.params["budget"]
    ])  # fmt: skip


def repeats(timed: Iterable[Timed], model: Overlap) -> list[list[Timed]]:
    """Steps with the same reader, budget and CTAs, whose bytes the model says come in time."""
    found: dict[tuple[str, float, int], list[Timed]] = {}
    for one in timed:
        if model.parts(one.collective, one.size, one.asked, one.sms)[1] == 0:
            found.setdefault((reader_of(one.case), one.asked, one.sms), []).append(one)
    return [group for group in found.values() if len(group) > 1]


@dataclass(frozen=True)
class Noise:
    """What is known of the times themselves.

    Attributes:
        plain, plain_middle: root of the mean square, and median, of what steps without a prefetch
            are off.
        spread: of a saving among its repeats, by squares.
        middle: the same from the median, which a graph that is far off does not move.
        decidable: part of all steps for which 15 % of the saving or loss is two of the latter.
        decidable_savings: the same of the savings above `LARGE`.
        decided: part of the decidable steps of which each reader's own constants tell the saving
            or loss to 15 %.
        again: part of these savings within 15 % of the mean of their repeats.
        large: how many they are, of those that have repeats.
        general, own: part of the same that the model tells, by the GPU's constants and with each
            reader's own.
    """

    plain: float
    plain_middle: float
    spread: float
    middle: float
    decidable: float
    decidable_savings: float
    decided: float
    again: float
    large: int
    general: float
    own: float


def told_by_the_other_half(
    timed: Sequence[Timed], models: Sequence[Overlap]
) -> tuple[dict[Timed, float], dict[Timed, float]]:
    """Savings by constants that were not fitted to them: the GPU's, and with each reader's own."""
    general, own = {}, {}
    first, second = halves(timed)
    for model, fitted_to, left_out in zip(models, (first, second), (second, first), strict=True):
        every, each = for_all(model, left_out), for_each(model, fitted_to)
        general |= {one: told(every, one) for one in left_out}
        own |= {one: told(each, one) for one in left_out}
    return general, own


def noise(rows: Sequence[Row], chip: Accelerator) -> Noise:
    timed = timed_rows(rows)
    models = [fit(half, chip) for half in halves(timed)]
    groups = repeats(timed, models[0])
    apart, pairs = [], []
    again: dict[Timed, float] = {}
    for group in groups:
        values = np.array([one.saved for one in group])
        apart.append(values - values.mean())
        pairs += [abs(a - b) for i, a in enumerate(values) for b in values[:i]]
        rest = (values.sum() - values) / (len(values) - 1)
        again |= dict(zip(group, rest.tolist(), strict=True))
    freedom = sum(len(group) - 1 for group in groups)
    middle = float(np.median(pairs)) / (_NORMAL * 2**0.5)
    general, own = told_by_the_other_half(timed, models)
    saved = np.array([one.saved for one in again])

    def close(foretold: dict[Timed, float]) -> float:
        return within(np.abs([foretold[one] - one.saved for one in again]), saved)

    plain = np.abs(off_the_sum(rows))
    every = np.array([one.saved for one in timed])
    sure = CLOSE * np.abs(every) >= _SURE * middle
    off = np.abs([own[one] - one.saved for one in timed])
    return Noise(
        plain=float(np.sqrt(np.mean(plain**2))),
        plain_middle=float(np.median(plain)),
        spread=float(np.sqrt(np.sum(np.concatenate(apart) ** 2) / freedom)),
        middle=middle,
        decidable=float(np.mean(sure)),
        decidable_savings=float(np.mean(sure[every > LARGE])),
        decided=within(off[sure], np.abs(every[sure]), 0.0),
        again=close(again),
        large=int(np.sum(saved > LARGE)),
        general=close(general),
        own=close(own),
    )


def noise_table(found: Noise) -> Table:
    table = Table("of the times", "", title="noise")
    us = f"{1e6 * found.plain:.2f} us, half of them less than {1e6 * found.plain_middle:.2f}"
    table.add_row("steps without a prefetch are off their sum", us)
    us = f"{1e6 * found.spread:.2f} us, by the median {1e6 * found.middle:.2f}"
    table.add_row("savings are off their repeats", us)
    table.add_row("decidable steps", f"{100 * found.decidable:.0f} %")
    part = f"{100 * found.decided:.0f} %"
    table.add_row("of these, within 15 % with each reader's own", part)
    table.add_row("decidable savings", f"{100 * found.decidable_savings:.0f} %")
    part = f"{100 * found.again:.0f} % of {found.large}"
    table.add_row("savings within 15 % of their repeats", part)
    table.add_row("of what the GPU's constants tell", f"{100 * found.general:.0f} %")
    table.add_row("of what each reader's own tells", f"{100 * found.own:.0f} %")
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=FILES)
    for file in parser.parse_args(argv).files:
        machine, rows = load_rows(file)
        bandwidth = next(row.params["bandwidth"] for row in rows if row.impl == "none")
        found = noise(rows, chip_of(machine["device"], bandwidth))
        Console().print(machine["device"], noise_table(found))


if __name__ == "__main__":
    main()
