"""Fit the rates of tiles of composed plans to a recorded sweep; needs no GPU.

    python benchmarks/fit_composed_tiles.py [FILE]

FILE is what `composed_sweep.py` wrote. Prints the rates for `recorded` of the templates,
and how far the choices with them are from the fastest of the tiles that it has rates for: of cases
that were fitted to, and of those that were left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from composed_sweep import NAME
from fit_tiles import ARCH, quality
from harness import RESULTS, load_rows

from warploom.codegen.attention.rates import ComposedRates
from warploom.codegen.attention.templates import CUDA
from warploom.codegen.choice.composed_cost import Reading
from warploom.codegen.source import TileConfig

Reals = npt.NDArray[np.float64]
# Tile -> its rates, as they are shipped.
RATES = {
    TileConfig(*sizes, template=cast(Any, template.name)): rates
    for template in CUDA
    if ARCH in template.recorded
    for sizes, rates in template.recorded[ARCH].composed.items()
}


@dataclass(frozen=True)
class Timed:
    """One case of a sweep: for each tile, what an SM reads, and the microseconds."""

    name: str
    prefix: int
    work: Mapping[TileConfig, Reading]
    times: Mapping[TileConfig, float]


def load(path: Path) -> list[Timed]:
    """Cases with the tiles that have rates."""
    machine, rows = load_rows(path)
    tiles = {tile.label: tile for tile in RATES}
    found: dict[str, Timed] = {}
    for row in rows:
        if row.impl in tiles and row.value is not None:
            tile = tiles[row.impl]
            one = found.setdefault(row.case, Timed(row.case, row.params["prefix"], {}, {}))
            work = reading(row.params, tile.rows, machine["multiprocessors"])
            found[row.case] = replace(
                one, work={**one.work, tile: work}, times={**one.times, tile: row.value}
            )
    return list(found.values())


def reading(params: Mapping[str, Any], rows: int, sms: int) -> Reading:
    """Of requests with one query row each, all with one prefix and keys of their own behind it."""
    batch, prefix, own = params["batch"], params["prefix"], params["batch"] * params["suffix"]
    fused = batch * params["q_heads"] // params["kv_heads"]
    tiles = -(-fused // rows)  # that read the prefix
    share = params["kv_heads"] / sms
    return Reading(share * (prefix + own), share * (tiles * prefix + own), share * (tiles + batch))


def _work(one: Reading) -> tuple[float, float, float, float]:
    """What each of the rates is multiplied with."""
    return 1.0, one.keys / 1000, one.walked / 1000, one.items


def fit(cases: Sequence[Timed]) -> dict[TileConfig, ComposedRates]:
    """Rates that are wrong the least, by squares of relative errors; none is negative."""
    found = {}
    for tile in RATES:
        timed = [one for one in cases if tile in one.times]
        work = np.array([_work(one.work[tile]) for one in timed])
        times = np.array([one.times[tile] for one in timed])
        rates = least_squares(work / times[:, None])
        found[tile] = ComposedRates(*(float(f"{rate:.3g}") for rate in rates))
    return found


def least_squares(work: Reals) -> Reals:
    """Rates, none below 0, whose products with the work are nearest to 1.

    The rates that are not 0 are the solution without the others, so that one of the 16 choices of
    them has it.
    """
    best, least = np.zeros(work.shape[1]), np.inf
    for used in product((False, True), repeat=work.shape[1]):
        rates = np.zeros(work.shape[1])
        rates[list(used)] = np.linalg.lstsq(work[:, used], np.ones(len(work)), rcond=None)[0]
        wrong = float(np.square(work @ rates - 1).sum())
        if rates.min() >= 0 and wrong < least:
            best, least = rates, wrong
    return best


def losses(rates: Mapping[TileConfig, ComposedRates], cases: Sequence[Timed]) -> list[float]:
    """Time of the tile that the model chooses, over that of the fastest."""
    found = []
    for one in cases:
        costs = {tile: np.dot(astuple(rates[tile]), _work(one.work[tile])) for tile in one.times}
        found.append(one.times[min(costs, key=costs.__getitem__)] / min(one.times.values()))
    return found


def held_out_losses(cases: Sequence[Timed]) -> list[float]:
    """Of all cases, each by rates that were fitted without its length of prefix."""
    lost = []
    for prefix in sorted({one.prefix for one in cases}):
        rates = fit([one for one in cases if one.prefix != prefix])
        lost += losses(rates, [one for one in cases if one.prefix == prefix])
    return lost


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS / f"{NAME}.jsonl")
    cases = load(parser.parse_args(argv).file)
    print(f"{len(cases)} cases; before: {quality(losses(RATES, cases))}")
    fitted = fit(cases)
    print(f"after: {quality(losses(fitted, cases))}")
    print(f"left out of the fit: {quality(held_out_losses(cases))}")
    print(f"\nfor composed of `recorded[{ARCH!r}]` of the templates:")
    for tile, rates in fitted.items():
        print(f"{tile.label}: {rates}")


if __name__ == "__main__":
    main()
