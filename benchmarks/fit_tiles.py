"""Fit the rates of Hopper's tiles for heads up to 64 lanes to a recorded sweep; needs no GPU.

    python benchmarks/fit_tiles.py [FILE]

FILE is what `tile_sweep.py --small-heads` wrote. Prints the rates as `codegen/tile_cost.py` holds
them, and how far the choices with them are from the fastest tile of each batch.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path

from harness import RESULTS, load_rows
from tile_sweep import KV_HEADS, PAGE, SMALL

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.codegen.tile_cost import MACHINES, Machine, Rates, Work, is_known, predicted_on
from warploom.dsl.dtypes import bfloat16
from warploom.dsl.spec import AttentionSpec
from warploom.dsl.trace import trace

ARCH = "sm_90a"
RELEVANT = 1.7  # times the fastest tile: how wrong the model is about slower ones changes no choice
_STEPS = (2.0, 1.4, 1.2, 1.1, 1.05, 1.02, 1.01)


@dataclass(frozen=True)
class Timed:
    """One batch of a sweep, and the microseconds of each tile."""

    dim: int
    work: Work
    times: Mapping[TileConfig, float]

    @property
    def best(self) -> float:
        return min(self.times.values())


def load(path: Path) -> list[Timed]:
    machine, rows = load_rows(path)
    times: dict[tuple[int, Work, int], dict[TileConfig, float]] = defaultdict(dict)
    for row in rows:
        case = row.params
        if row.value is None:
            continue
        items = case["requests"] * KV_HEADS / machine["multiprocessors"]
        work = Work(case["fused_rows"], items, case["keys"])
        times[case["dim"], work, case["group_size"]][TileConfig(**case["tile"])] = row.value
    return [Timed(dim, work, found) for (dim, work, _), found in times.items()]


@cache
def spec_of(dim: int) -> AttentionSpec:
    return AttentionSpec(trace(wl.Causal()), dim, dim, bfloat16, wl.Paged(PAGE))


def predicted(machine: Machine, one: Timed, tile: TileConfig) -> float:
    return predicted_on(machine, spec_of(one.dim), tile, one.work)


def fit(machine: Machine, batches: Sequence[Timed]) -> Machine:
    """The machine with rates of Hopper tiles of its own for these batches, by rows of the tile."""
    rows = {tile.rows for one in batches for tile in one.times if tile.template == "hopper"}
    rates: dict[int, Rates] = {}
    for height in sorted(rows):
        wrong = partial(_wrong, machine, batches, height)
        rates[height] = descend(wrong, machine.small_heads.get(height, machine.hopper))
    return replace(machine, small_heads=rates)


def _wrong(machine: Machine, batches: Sequence[Timed], height: int, rates: Rates) -> float:
    """Mean square of the logarithm of predicted over measured time."""
    tried = replace(machine, small_heads={height: rates})
    return statistics.mean(
        math.log(predicted(tried, one, tile) / us) ** 2
        for one in batches
        for tile, us in one.times.items()
        if tile.template == "hopper" and tile.rows == height
        if us <= RELEVANT * one.best and is_known(tile, one.work)
    )


def descend(wrong: Callable[[Rates], float], rates: Rates) -> Rates:
    """Coordinate descent: one rate after the other is made greater or smaller while that helps."""
    least = wrong(rates)
    for step in _STEPS:
        improved = True
        while improved:
            improved = False
            for rate in fields(Rates):
                for factor in (step, 1 / step):
                    tried = replace(rates, **{rate.name: getattr(rates, rate.name) * factor})
                    if (found := wrong(tried)) < least * (1 - 1e-6):
                        rates, least, improved = tried, found, True
    return rates


def losses(machine: Machine, batches: Sequence[Timed]) -> list[float]:
    """Time of the tile that the model chooses, over that of the fastest."""
    found = []
    for one in batches:
        known = [tile for tile in one.times if is_known(tile, one.work)]
        chosen = min(known, key=lambda tile: predicted(machine, one, tile))
        found.append(one.times[chosen] / one.best)
    return found


def quality(machine: Machine, batches: Sequence[Timed]) -> str:
    lost = losses(machine, batches)
    near = sum(loss <= 1.1 for loss in lost) / len(lost)
    return f"within 10 %: {near:.0%}, mean {statistics.mean(lost):.3f} x, worst {max(lost):.2f} x"


def text(machine: Machine) -> str:
    """As in codegen/tile_cost.py."""
    lines = []
    for height, rates in machine.small_heads.items():
        named = ", ".join(f"{x.name}={getattr(rates, x.name):.3g}" for x in fields(Rates))
        lines.append(f"            {height}: Rates({named}),")
    return "\n".join(["        small_heads={", *lines, "        },"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS / f"{SMALL}.jsonl")
    batches = load(parser.parse_args(argv).file)
    machine = MACHINES[ARCH]
    print(f"{len(batches)} batches; before: {quality(machine, batches)}")
    fitted = fit(machine, batches)
    print(f"after: {quality(fitted, batches)}")
    lost = zip(losses(fitted, batches), batches, strict=True)
    for loss, one in sorted(lost, key=lambda found: -found[0])[:5]:
        print(f"  {loss:.2f} x: head_dim {one.dim}, {one.work}")
    print(f"\nfor MACHINES[{ARCH!r}] in codegen/tile_cost.py:\n{text(fitted)}")


if __name__ == "__main__":
    main()
