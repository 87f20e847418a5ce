"""What a composed batch costs with a tile, and which tile is the cheapest: pure functions.

A tile that holds many rows reads a prefix once for all of them, but own parts fill few of its rows.
Where the keys are many and short parts few, reading them once counts; where parts are short, the
work that padding makes does. The model has four rates for each tile, fitted to
`benchmarks/results/composed_tiles.jsonl`; a test compares the choices with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

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


@dataclass(frozen=True)
class Rates:
    """Microseconds of an SM.

    Attributes:
        launch: of a batch that has next to nothing to do, merging included.
        read, walk: of 1000 keys.
        item: of a work item.
    """

    launch: float
    read: float
    walk: float
    item: float


# Template, rows, keys and warps of a tile.
Kind: TypeAlias = tuple[Literal["portable", "hopper"], int, int, int]

# Fitted to the sweep of an NVIDIA H200 (`benchmarks/fit_composed_tiles.py`).
RATES: dict[str, dict[Kind, Rates]] = {
    "sm_90a": {
        ("portable", 16, 64, 2): Rates(launch=12.7, read=6.52, walk=9.44, item=0.325),
        ("portable", 64, 32, 2): Rates(launch=18, read=3.05, walk=15.3, item=0.864),
        ("hopper", 128, 128, 8): Rates(launch=16.8, read=0, walk=17.3, item=2.03),
    }
}


def composed_tiles(spec: AttentionSpec, arch: Arch) -> list[TileConfig]:
    """Tiles that the model chooses from; none where no sweep tells their cost.

    It had 16-bit keys that nothing transforms, and heads of 128.
    """
    hooks, widest = spec.variant.hooks, max(spec.head_dim_qk, spec.head_dim_v)
    transformed = "key_transform" in hooks or "value_transform" in hooks or spec.is_narrow
    if transformed or not 64 < widest <= 128:
        return []
    known = RATES.get(arch.name, {})
    return [tile for tile in every_tile(spec, arch) if _kind(tile) in known]


def predicted_composed_us(
    spec: AttentionSpec, arch: Arch, tile: TileConfig, reading: Reading
) -> float:
    """Time of a composed batch."""
    rates = RATES[arch.name][_kind(tile)]
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


def _kind(tile: TileConfig) -> Kind:
    return tile.template, tile.rows, tile.keys, tile.warps
