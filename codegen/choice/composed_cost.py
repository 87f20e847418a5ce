"""What a composed batch costs with a tile, and which tile is the cheapest: pure functions.

A tile that holds many rows reads a prefix once for all of them, but own parts fill few of its rows.
Where the keys are many and short parts few, reading them once counts; where parts are short, the
work that padding makes does. The model has four rates for each tile, those of
`CudaTemplate.composed_rates`, fitted to `benchmarks/results/composed_tiles.jsonl`; a test compares
the choices with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warploom.codegen.attention.templates import template_of
from warploom.codegen.choice.tile_choice import every_tile
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.spec import AttentionSpec

_FITTED_LANES = 2 * 128  # of a key and its value, in 16 bits


@dataclass(frozen=True)
class Reading:
    """What an SM does for a batch, on average.

    Attributes:
        keys: that it reads from memory, each once.
        walked: keys that its tiles walk: each once for every tile that reads it.
        items: tiles, of all parts.
    """

    keys: float
    walked: float
    items: float


def composed_tiles(spec: AttentionSpec, arch: Arch) -> list[TileConfig]:
    """Tiles that the model chooses from; none where no sweep tells their cost.

    It had 16-bit keys that nothing transforms, and heads of 128.
    """
    hooks, widest = spec.variant.hooks, max(spec.head_dim_qk, spec.head_dim_v)
    transformed = "key_transform" in hooks or "value_transform" in hooks or spec.is_narrow
    if transformed or not 64 < widest <= 128:
        return []
    return [
        tile
        for tile in every_tile(spec, arch)
        if template_of(tile).composed_rates(tile, arch) is not None
    ]


def predicted_composed_us(
    spec: AttentionSpec, arch: Arch, tile: TileConfig, reading: Reading
) -> float:
    """Time of a composed batch with one of `composed_tiles`."""
    rates = template_of(tile).composed_rates(tile, arch)
    assert rates is not None  # it is one of them
    share = (spec.head_dim_qk + spec.head_dim_v) / _FITTED_LANES
    keys = share * (rates.read * reading.keys + rates.walk * reading.walked) / 1000
    return rates.launch + keys + rates.item * reading.items


def cheapest_composed_tile(
    spec: AttentionSpec,
    arch: Arch,
    pool: Sequence[TileConfig],
    reading_with: Callable[[int], Reading],
) -> TileChoice:
    """The tile that the model predicts to be fastest.

    Args:
        spec: what to compute.
        arch: where.
        pool: the `composed_tiles` of both, of which there are some.
        reading_with: what an SM reads with tiles of so many rows.
    """
    reading = {tile: reading_with(tile.rows) for tile in pool}
    costs = {tile: predicted_composed_us(spec, arch, tile, reading[tile]) for tile in pool}
    ranked = sorted(pool, key=lambda tile: costs[tile])  # the first of equals
    tile = ranked[0]
    work = reading[tile]
    return TileChoice(
        tile,
        reason=f"the cheapest of {len(pool)} by the model of costs of shared prefixes, for "
        f"{work.keys:.4g} keys of each SM to read and {work.walked:.4g} to walk, in "
        f"{work.items:.3g} tiles of {tile.rows} rows",
        costs=tuple((found.label, costs[found]) for found in ranked),
    )
