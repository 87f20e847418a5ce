"""The time of a composed batch with a tile, and the cheapest tile: pure functions.

A tile of many rows reads a prefix once for all of them, but a request's own part fills few of its
rows. With many keys and few short parts, reading keys once matters; with short parts, the work on
padding does. The model has four rates for each tile (`CudaTemplate.composed_rates`), fitted to
`benchmarks/results/composed_tiles.jsonl`; a test compares the choices with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warploom.codegen.attention.templates import template_of
from warploom.codegen.choice.tile_choice import every_tile
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.spec import AttentionSpec

_FITTED_LANES = 2 * 128  # 16-bit lanes of a key and its value, to which the rates were fitted


@dataclass(frozen=True)
class Reading:
    """The average work of an SM for a batch.

    Attributes:
        keys: keys that it reads from memory, each once.
        walked: keys that its tiles walk: a key counts once for every tile that reads it.
        items: tiles of all parts.
    """

    keys: float
    walked: float
    items: float


def composed_tiles(spec: AttentionSpec, arch: Arch) -> list[TileConfig]:
    """Tiles that the model chooses from; none that the recorded sweep does not cover.

    The sweep had 16-bit keys without transforms, and heads of 128 lanes.
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
    """Predicted time of a composed batch with one of `composed_tiles`, in microseconds."""
    rates = template_of(tile).composed_rates(tile, arch)
    assert rates is not None  # `tile` is one of `composed_tiles`
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
        arch: target architecture.
        pool: the `composed_tiles` of spec and arch, at least one.
        reading_with: returns the work of an SM with tiles of a given number of rows.
    """
    reading = {tile: reading_with(tile.rows) for tile in pool}
    costs = {tile: predicted_composed_us(spec, arch, tile, reading[tile]) for tile in pool}
    ranked = sorted(pool, key=lambda tile: costs[tile])  # stable: the first of equals wins
    tile = ranked[0]
    work = reading[tile]
    return TileChoice(
        tile,
        reason=f"the cheapest of {len(pool)} by the model of costs of shared prefixes, for "
        f"{work.keys:.4g} keys of each SM to read and {work.walked:.4g} to walk, in "
        f"{work.items:.3g} tiles of {tile.rows} rows",
        costs=tuple((found.label, costs[found]) for found in ranked),
    )
