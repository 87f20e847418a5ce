"""Fit what prefetching saves to recorded steps, and say how far it is off; needs no GPU.

    python benchmarks/fit_prefetch.py [FILE ...] [--kept]

FILEs are what `prefetch.py` wrote, parts of one run on one GPU; or `prefetch_marks.py`, whose steps
with weights that were marked to be evicted last are taken with --kept, and the others without it.
Half of the cases are fitted to: every other duration of every reader, the others of its neighbour.
Prints the constants for `warploom.prefetch.Overlap`, and of the cases that were left out: the
error, which the choice knows, how many savings are within 15 %, how far a whole step's time is off,
and what the choice loses at worst. Each once with the constants of the GPU alone, and once with the
one constant that a reader has of its own, taken from its fitted cases; and both again with the
halves exchanged. Then what is chosen for each step. `prefetch_noise.py` says what of that the times
allow.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import RESULTS, Row, load_rows
from rich.console import Console
from rich.table import Table

from warploom.prefetch import (
    H100_OVERLAP,
    H200,
    H200_OVERLAP,
    Accelerator,
    Overlap,
    SafeBudget,
    Timed,
    accelerator_named,
)
from warploom.serving.prefetch.overlap import by_case

Reals = npt.NDArray[np.float64]
Models = Mapping[str, Overlap]  # by the reader's name
MB = 10**6
COLLECTIVE_SMS = 16  # of the stand-in
STARTUPS = np.arange(0, 6.5e-6, 0.5e-6)
RATES = np.geomspace(1 / 256, 1 / 4, 25)  # of the bandwidth, for one CTA
CLOSE = 0.15
LARGE = 0.6e-6  # savings that count; fixed, so that no model is asked easier questions
# A late start with a high rate is much like an early one with a low rate, so both move at once.
_AROUND = np.array([-4, -2, -1, 0, 1, 2, 4])
_LOOKS = 30
_LITTLE = 1e-6
_ROUNDS = 20
_FLOOR = 1e-9
_MOST_GAIN = 0.99


def reader_of(case: str) -> str:
    return case.rpartition(",")[0]


def usual(rows: Sequence[Row]) -> list[Row]:
    """Those behind a stand-in of the usual SMs; one that holds others is another collective."""
    return [x for x in rows if x.params.get("collective_sms", COLLECTIVE_SMS) == COLLECTIVE_SMS]


def alone(rows: Sequence[Row]) -> dict[str, float]:
    """Microseconds that each reader takes behind a collective, without a prefetch.

    A step without one is the collective's time and the reader's, to a tenth of a microsecond. But
    a single graph may be off by ten times that, and with it all savings of its case; so a reader's
    time is the median of all its steps.
    """
    found: dict[str, list[float]] = {}
    for row in usual(rows):
        if row.value is not None and not row.params["budget"]:
            without = row.value - row.params["collective_us"]
            found.setdefault(reader_of(row.case), []).append(without)
    return {name: median(values) for name, values in found.items()}


def timed_rows(rows: Sequence[Row]) -> list[Timed]:
    """Steps with a budget that was given, each beside the step without one."""
    readers = alone(rows)
    found = []
    for row in usual(rows):
        at = row.params
        name = reader_of(row.case)
        if (
            row.impl.startswith("chosen")
            or row.value is None
            or name not in readers
            or not at["budget"]
        ):
            continue
        without = at["collective_us"] + readers[name]
        found.append(
            Timed(
                row.case, 1e-6 * at["collective_us"], at["bytes"], min(at["budget"], at["bytes"]),
                at["sms"], 1e-6 * without, 1e-6 * row.value,
            )
        )  # fmt: skip
    return found


def halves(timed: Sequence[Timed]) -> tuple[list[Timed], list[Timed]]:
    """A checkerboard of readers and durations."""
    readers = list(dict.fromkeys(reader_of(one.case) for one in timed))
    durations = sorted({one.collective for one in timed})

    def colour(one: Timed) -> int:
        reader = readers.index(reader_of(one.case))
        return (reader + durations.index(one.collective)) % 2

    return [x for x in timed if not colour(x)], [x for x in timed if colour(x)]


def fit(timed: Sequence[Timed], chip: Accelerator) -> Overlap:
    """The least sum of seconds by which savings are off; the errors are left 0.

    Not of their squares: one graph in ten is off by half a microsecond and more.
    """
    if not timed:
        raise SystemExit("there is no step with a prefetch in this file")
    bandwidth = chip.memory_bandwidth
    startups, rates = STARTUPS, RATES * bandwidth
    steps = float(STARTUPS[1]), float(RATES[1] / RATES[0])
    best, least = Overlap(bandwidth, 0.0, bandwidth, chip.budget, bandwidth, 0.0, 0.0, 0.0), np.inf
    for _ in range(_LOOKS):
        before = least
        for startup, rate in product(startups.tolist(), rates.tolist()):
            tried, off = with_gain(timed, chip, startup, rate)
            if off < least:
                best, least = tried, off
        if before - least <= _LITTLE * least:  # nothing around is better: look closer
            steps = steps[0] / 2, steps[1] ** 0.5
        startups = np.maximum(0, best.startup + steps[0] * _AROUND)
        rates = best.rate * steps[1] ** _AROUND
    return best


def with_gain(
    timed: Sequence[Timed], chip: Accelerator, startup: float, rate: float
) -> tuple[Overlap, float]:
    """The rate of hits and the fixed cost that go with a startup and a rate, and how far off."""
    bandwidth = chip.memory_bandwidth
    tried = Overlap(bandwidth, startup, rate, chip.budget, bandwidth, 0.0, 0.0, 0.0)
    parts = np.array([tried.parts(x.collective, x.size, x.asked, x.sms) for x in timed])
    wanted = parts[:, 1] + np.array([x.saved for x in timed])
    gain = min(max(0.0, slope(parts[:, 0], wanted)), _MOST_GAIN)
    short = gain * parts[:, 0] - wanted
    cost = float(np.median(short))
    off = float(np.sum(np.abs(short - cost)))
    return replace(tried, hit_rate=bandwidth / (1 - gain), fixed=cost), off


def slope(at: Reals, wanted: Reals) -> float:
    """Of the line with the least sum of distances, by squares that are weighted anew."""
    weights = np.full(len(at), 1.0)
    found = 0.0
    for _ in range(_ROUNDS):
        share = weights / weights.sum()
        x, y = at - share @ at, wanted - share @ wanted
        spread = (share * x) @ x
        if spread == 0:
            return 0.0
        found = float((share * x) @ y / spread)
        weights = 1 / np.maximum(np.abs(y - found * x), _FLOOR)
    return found


def for_all(model: Overlap, timed: Iterable[Timed]) -> Models:
    """The GPU's constants for each reader."""
    return {reader_of(one.case): model for one in timed}


def for_each(model: Overlap, timed: Sequence[Timed]) -> Models:
    """Each reader's own constant, from its steps among those given."""
    return {
        name: model.for_reader([one for one in timed if reader_of(one.case) == name])
        for name in for_all(model, timed)
    }


@dataclass(frozen=True)
class Quality:
    """How far models are off recorded steps.

    Attributes:
        error: root of the mean square of seconds saved.
        middle: half of the savings are off by less.
        close: part of the savings within 15 %, of those larger than `LARGE`.
        large: how many these are.
        step: the most by which the whole step's time is off, as a part of it.
        loss: the most by which a chosen budget lengthens a step, as a part of it.
        missed: the most by which the best recorded budget is better than the chosen one.
        gained: part of a step that the choice saves, on the average.
    """

    error: float
    middle: float
    close: float
    large: int
    step: float
    loss: float
    missed: float
    gained: float


def told(models: Models, one: Timed) -> float:
    return models[reader_of(one.case)].saved(one.collective, one.size, one.asked, one.sms)


def within(off: Reals, saved: Reals, least: float = LARGE) -> float:
    """Part of the savings above the least that are off by at most 15 % of themselves."""
    large = saved > least
    return float(np.mean(off[large] <= CLOSE * saved[large])) if large.any() else 0.0


def choice(models: Models, steps: Sequence[Timed]) -> tuple[float, float, float]:
    """Bytes that are chosen for a case, seconds that they save, and that the best budget does."""
    first = steps[0]
    at = models[reader_of(first.case)].best_bytes(first.collective, first.size, first.sms)
    asked = [0.0, *(one.asked for one in steps)]
    real = [0.0, *(one.saved for one in steps)]
    return at, float(np.interp(at, asked, real)), max(real)


@dataclass(frozen=True)
class Choice:
    """What is chosen for a case among recorded CTAs.

    Attributes:
        case: of it.
        asked, sms: bytes and CTAs; 0 bytes are no prefetch.
        told, saved: seconds that the model says, and that steps say, read between recorded budgets.
        without: seconds of the step without a prefetch.
        best: seconds that the best recorded step saves.
    """

    case: str
    asked: int
    sms: int
    told: float
    saved: float
    without: float
    best: float


def choices(models: Models, timed: Sequence[Timed]) -> list[Choice]:
    """As `SafeBudget` chooses, of the CTAs that a case was recorded with."""
    steps = by_case(timed)
    found = []
    for case in dict.fromkeys(one.case for one in timed):
        recorded = {sms: mine for (name, sms), mine in steps.items() if name == case}
        first = next(iter(recorded.values()))[0]
        model = models[reader_of(case)]
        asked, sms = SafeBudget(model, first.collective, tuple(recorded)).best(first.size)
        mine = recorded[sms]
        at = [0.0, *(one.asked for one in mine)]
        real = float(np.interp(asked, at, [0.0, *(one.saved for one in mine)]))
        told = model.saved(first.collective, first.size, asked, sms)
        best = max(0.0, *(one.saved for every in recorded.values() for one in every))
        found.append(Choice(case, asked, sms, told, real, first.without, best))
    return found


def quality(models: Models, timed: Sequence[Timed]) -> Quality:
    """Of all steps given; chosen budgets lie between recorded ones, and so do their times."""
    off = np.abs([told(models, one) - one.saved for one in timed])
    saved = np.array([one.saved for one in timed])
    gains, missed = [], [0.0]
    for steps in by_case(timed).values():
        got, best = choice(models, steps)[1:]
        gains.append(got / steps[0].without)
        missed.append((best - got) / steps[0].without)
    return Quality(
        error=float(np.sqrt(np.mean(off**2))),
        middle=float(np.median(off)),
        close=within(off, saved),
        large=int(np.sum(saved > LARGE)),
        step=float(np.max(off / np.array([one.seconds for one in timed]))),
        loss=max(0.0, -min(gains)),
        missed=max(missed),
        gained=float(np.mean(gains)),
    )


def checked_fit(
    rows: Sequence[Row], chip: Accelerator, exchanged: bool = False
) -> tuple[Overlap, Quality, Quality]:
    """Fitted to one half of the cases; its errors are those of the other.

    Returns:
        The constants, and their quality on the other half: the GPU's alone, and each reader's own.
    """
    fitted_to, left_out = halves(timed_rows(rows))[:: -1 if exchanged else 1]
    model = fit(fitted_to, chip)
    model = replace(
        model,
        error=quality(for_all(model, left_out), left_out).error,
        own_error=quality(for_each(model, fitted_to), left_out).error,
    )
    every, each = for_all(model, left_out), for_each(model, fitted_to)
    return model, quality(every, left_out), quality(each, left_out)


def chip_of(name: str, bandwidth: float) -> Accelerator:
    """The accelerator with this in its name, with the measured bandwidth."""
    known = next((chip for chip in ("H100", "H200", "B200") if chip in name), H200.name)
    return replace(accelerator_named(known), memory_bandwidth=bandwidth)


def overlap_of(name: str) -> Overlap | None:
    """Recorded constants of the GPU with this name."""
    known = {"H100": H100_OVERLAP, "H200": H200_OVERLAP}
    return next((model for chip, model in known.items() if chip in name), None)


def fit_table(model: Overlap, *found: Quality) -> Table:
    """Constants, and what is known of them: of the GPU alone, and of each reader's own."""
    table = Table("constant", "value", "reader's own", title="fit")
    own = [""] * (len(found) - 1)
    table.add_row("bandwidth", f"{model.bandwidth / 1e12:.2f} TB/s", *own)
    table.add_row("startup", f"{1e6 * model.startup:.2f} us", *own)
    table.add_row("rate of one CTA", f"{model.rate / 1e9:.0f} GB/s", *own)
    table.add_row("rate of hits", f"{model.hit_rate / 1e12:.2f} TB/s", *own)
    table.add_row("kept, half of L2", f"{model.kept / MB:.0f} MB", *own)
    table.add_row("fixed", f"{1e6 * model.fixed:.2f} us", *own)
    lines: list[tuple[str, Any]] = [
        ("error, of cases left out", lambda q: f"{1e6 * q.error:.2f} us"),
        ("half of them are off by less than", lambda q: f"{1e6 * q.middle:.2f} us"),
        ("savings within 15 %", lambda q: f"{100 * q.close:.0f} % of {q.large}"),
        ("a step's time is off at most", lambda q: f"{100 * q.step:.1f} %"),
        ("the choice loses at worst", lambda q: f"{100 * q.loss:.1f} %"),
        ("and misses of the best budget", lambda q: f"{100 * q.missed:.1f} %"),
        ("and saves on the average", lambda q: f"{100 * q.gained:.2f} %"),
    ]
    for name, shown in lines:
        table.add_row(name, *(shown(one) for one in found))
    return table


def choice_table(timed: Sequence[Timed], every: Models, each: Models) -> Table:
    """What is chosen, bytes and CTAs, and what that saves, read between recorded budgets."""
    table = Table("step", "alone", "best saves", title="chosen; us")
    for column in ("GPU's", "saves", "told", "own", "saves", "told"):
        table.add_column(column)
    for both in zip(choices(every, timed), choices(each, timed), strict=True):
        first = both[0]
        cells = [f"{1e6 * first.without:.1f}", f"{1e6 * first.best:.1f}"]
        for one in both:
            size = f"{one.asked / MB:.1f} MB, {one.sms} CTAs"
            shown = [size, f"{1e6 * one.saved:.1f}", f"{1e6 * one.told:.1f}"]
            cells += shown if one.asked else ["none", "", ""]
        table.add_row(first.case, *cells)
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=[RESULTS / "prefetch.jsonl"])
    parser.add_argument("--kept", action="store_true", help="steps with marks, not those without")
    options = parser.parse_args(argv)
    parts = [load_rows(file) for file in options.files]
    machine, rows = parts[0][0], [row for _, mine in parts for row in mine]
    kept = options.kept
    rows = [x for x in rows if not x.params["budget"] or x.params.get("keep", False) == kept]
    if len({facts["device"] for facts, _ in parts}) > 1:
        parser.error("these files are of several GPUs")
    bandwidth = next(row.params["bandwidth"] for row in rows if row.impl == "none")
    chip = chip_of(machine["device"], bandwidth)
    console = Console()
    for exchanged in (False, True):
        title = "halves exchanged" if exchanged else machine["device"]
        model, *found = checked_fit(rows, chip, exchanged)
        console.print(title, fit_table(model, *found), repr(model))
    model, _, _ = checked_fit(rows, chip)
    timed = timed_rows(rows)
    console.print(choice_table(timed, for_all(model, timed), for_each(model, halves(timed)[0])))


if __name__ == "__main__":
    main()
