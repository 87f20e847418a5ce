"""Fit the rates of tiles for heads up to 64 lanes to a recorded sweep; needs no GPU.

    python benchmarks/fit_tiles.py [FILE]

FILE is what `tile_sweep.py --small-heads` wrote. Prints the rates for `recorded` of the templates,
and how far the choices with them are from the fastest tile of each batch: of those that were fitted
to, and of those that were left out. What memory does is the same for heads of any width, and is
left as it is.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from harness import RESULTS, load_rows
from tile_sweep import KV_HEADS, PAGE, SMALL

import warploom as wl
from warploom.codegen.attention.rates import Rates
from warploom.codegen.attention.template import Work
from warploom.codegen.attention.templates import CUDA, template_of
from warploom.codegen.choice.cost import MACHINES, Machine, predicted_with
from warploom.codegen.choice.tile_choice import tiles_weighed
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import bfloat16
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace

ARCH = "sm_90a"
RELEVANT = 1.7  # times the fastest tile: how wrong the model is about slower ones changes no choice
# Weight of how far rates are from those of wide heads, beside how far times are from measured ones.
# Some rates hardly show in the sweep: most of its requests have 2,048 keys, so that `item` could as
# well be a part of `flops`. Without a hold such rates end anywhere, for one at 0.
HOLD = 5e-4
PARTS = 3  # of a sweep, each of which is left out once
_STEPS = (2.0, 1.4, 1.2, 1.1, 1.05, 1.02, 1.01)

Numbers = TypeVar("Numbers", Rates, Machine)
Fit = Callable[[Sequence["Timed"]], "Model"]


@dataclass(frozen=True)
class Model:
    """What memory does, and rates by the kind of a tile, for heads up to 64 lanes or for others."""

    machine: Machine
    rates: Mapping[str, Rates]

    @classmethod
    def shipped(cls, *, small_heads: bool) -> Model:
        """With the rates that templates have."""
        rates: dict[str, Rates] = {}
        for template in CUDA:
            if ARCH in template.recorded:
                found = template.recorded[ARCH]
                rates |= found.small_heads if small_heads else found.wide_heads
        return cls(MACHINES[ARCH], rates)

    def predicted(self, spec: AttentionSpec, tile: TileConfig, work: Work) -> float:
        """Microseconds of a batch."""
        rates = self.rates[template_of(tile).kind(tile)]
        return predicted_with(rates, self.machine, spec, tile, work)


@dataclass(frozen=True)
class Timed:
    """One batch of a sweep, and the microseconds of each tile."""

    dim: int
    work: Work
    times: Mapping[TileConfig, float]

    @property
    def best(self) -> float:
        return min(self.times.values())

    @property
    def shape(self) -> tuple[float, ...]:
        """What the model sees of it: the sweep has some shapes with two sizes of groups."""
        return self.dim, self.work.rows, self.work.items, self.work.keys


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


def weighed(batches: Sequence[Timed]) -> list[Timed]:
    """Batches that the model chooses for, each with the tiles that it chooses from."""
    found = []
    for one in batches:
        pool = tiles_weighed(spec_of(one.dim), arch_named(ARCH))
        times = {tile: us for tile, us in one.times.items() if tile in pool}
        if one.work.rows > 1 and times:
            found.append(replace(one, times=times))
    return found


def fit(machine: Machine, batches: Sequence[Timed]) -> Model:
    """Rates of their own for small heads, which these batches have.

    Hopper tiles of 192 rows, which wide heads do not have, begin as those of 128 rows.
    """
    wide = Model.shipped(small_heads=False).rates
    likes = {**wide, "hopper 192": wide["hopper 128"]}
    return Model(machine, fit_rates(machine, batches, likes))


def fit_rates(
    machine: Machine, batches: Sequence[Timed], likes: Mapping[str, Rates]
) -> dict[str, Rates]:
    """Rates of each kind of tile, one after the other.

    Args:
        machine: what memory does.
        batches: whose times count.
        likes: kind -> rates that its own begin with, and are held to.
    """

    def own(kind: str, like: Rates) -> Rates:
        times = [
            found for found in _relevant(batches) if template_of(found[1]).kind(found[1]) == kind
        ]
        found = descend(partial(_wrong, machine, times, like), like, _names(Rates))
        return Rates(*(float(f"{rate:.3g}") for rate in astuple(found)))

    return {kind: own(kind, like) for kind, like in likes.items()}


def fit_memory(model: Model, batches: Sequence[Timed]) -> Model:
    """The model with what its memory does as it fits these batches best, and its rates."""
    times = list(_relevant(batches))

    def wrong(tried: Machine) -> float:
        found = replace(model, machine=tried)
        return statistics.fmean(
            math.log(found.predicted(spec, tile, work) / us) ** 2 for spec, tile, work, us in times
        )

    return replace(model, machine=descend(wrong, model.machine, _names(Machine)))


def _relevant(
    batches: Sequence[Timed],
) -> Iterator[tuple[AttentionSpec, TileConfig, Work, float]]:
    """Times that the model should predict."""
    for one in batches:
        for tile, us in one.times.items():
            if us <= RELEVANT * one.best and template_of(tile).is_known(tile, one.work):
                yield spec_of(one.dim), tile, one.work, us


def _names(numbers: type[Rates] | type[Machine]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(numbers))


def _wrong(
    machine: Machine,
    times: Sequence[tuple[AttentionSpec, TileConfig, Work, float]],
    like: Rates,
    rates: Rates,
) -> float:
    """Mean square of the logarithm of predicted over measured time, and of rates over like ones."""
    predicted = statistics.fmean(
        math.log(predicted_with(rates, machine, spec, tile, work) / us) ** 2
        for spec, tile, work, us in times
    )
    held = statistics.fmean(
        math.log(a / b) ** 2 for a, b in zip(astuple(rates), astuple(like), strict=True)
    )
    return predicted + HOLD * held


def descend(wrong: Callable[[Numbers], float], model: Numbers, names: Sequence[str]) -> Numbers:
    """Coordinate descent: one number after the other grows or shrinks while that helps."""
    least = wrong(model)
    for step in _STEPS:
        improved = True
        while improved:
            improved = False
            for name in names:
                for factor in (step, 1 / step):
                    tried = replace(model, **{name: getattr(model, name) * factor})
                    if (found := wrong(tried)) < least * (1 - 1e-6):
                        model, least, improved = tried, found, True
    return model


def held_out_losses(fitted_to: Fit, batches: Sequence[Timed]) -> list[float]:
    """Of all batches, each by a model that was fitted without its shape.

    Shapes in ascending order are assigned to three parts in turn, and each part is left out once.

    Args:
        fitted_to: makes the model of some batches.
        batches: of one sweep.
    """
    shapes, lost = sorted({one.shape for one in batches}), []
    for part in range(PARTS):
        out = set(shapes[part::PARTS])
        model = fitted_to([one for one in batches if one.shape not in out])
        lost += losses(model, [one for one in batches if one.shape in out])
    return lost


def losses(model: Model, batches: Sequence[Timed], lengths_known: bool = True) -> list[float]:
    """Time of the tile that the model chooses, over that of the fastest."""
    found = []
    for one in batches:
        spec = spec_of(one.dim)
        work = one.work if lengths_known else replace(one.work, keys=Work.keys)
        costs = {
            tile: model.predicted(spec, tile, work)
            for tile in one.times
            if template_of(tile).is_known(tile, work)
        }
        found.append(one.times[min(costs, key=costs.__getitem__)] / one.best)
    return found


def quality(lost: Sequence[float]) -> str:
    near, mean = sum(loss <= 1.1 for loss in lost) / len(lost), statistics.geometric_mean(lost)
    return f"within 10 %: {near:.0%}, mean {mean:.3f} x, worst {max(lost):.2f} x"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS / f"{SMALL}.jsonl")
    batches = load(parser.parse_args(argv).file)
    shipped = Model.shipped(small_heads=True)
    print(f"{len(batches)} batches; before: {quality(losses(shipped, batches))}")
    fitted = fit(shipped.machine, batches)
    lost = losses(fitted, batches)
    print(f"after: {quality(lost)}")
    held_out = held_out_losses(partial(fit, shipped.machine), batches)
    print(f"left out of the fit: {quality(held_out)}")
    print(f"without the number of keys: {quality(losses(fitted, batches, lengths_known=False))}")
    for loss, one in sorted(zip(lost, batches, strict=True), key=lambda found: -found[0])[:5]:
        print(f"  {loss:.2f} x: head_dim {one.dim}, {one.work}")
    print(f"\nfor small_heads of `recorded[{ARCH!r}]` of the templates:\n{fitted.rates}")


if __name__ == "__main__":
    main()
