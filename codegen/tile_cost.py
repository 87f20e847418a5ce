"""What a batch costs with a tile: a model of few rates, fitted to a recorded sweep.

An SM walks keys. For each key it computes with all rows of the tile, padding included, and it reads
the key's bytes; the slower of the two counts. To that come a launch, what a query tile costs beside
its keys, and, where tiles are cut for all SMs to have work, joining the parts. All times are in
microseconds, all amounts those of one SM. `benchmarks/results/tile_sweep.jsonl` is the record, and
`tile_sweep_small_heads.jsonl` that of heads up to 64 lanes, to which `benchmarks/fit_tiles.py` fits
rates of their own. A test compares the choices with both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from warploom.codegen.arch import Arch
from warploom.codegen.source import TileConfig
from warploom.dsl.spec import AttentionSpec

TYPICAL_KEYS = 2048.0  # where lengths are unknown
MANY_ITEMS = 8.0  # where the number of items is
MOST_TILES = 16  # of one request in the sweep: what more of them cost is unknown
_SHARING_TILES = 4  # query tiles of a request from which on the planner lets them share the cache
SMALL_HEADS = 64  # lanes, up to which heads have rates of their own
_LANES = 128 * 64  # the product of lanes and rows that `Rates.join` is for


@dataclass(frozen=True)
class Work:
    """A batch.

    Attributes:
        rows: mean fused query rows of a request.
        items: pairs of a request and a key/value head for each SM.
        keys: of a request. Too many cost less than too few: a tile whose rows are few reads them
            again and again.
    """

    rows: float
    items: float = MANY_ITEMS
    keys: float = TYPICAL_KEYS


@dataclass(frozen=True)
class Rates:
    """One kind of tile on one architecture.

    Attributes:
        flops: millions of operations in a microsecond.
        launch: time of a batch that has next to nothing to do.
        item: of a query tile, beside its keys. Tiles of 16 rows stream on to the next, so that it
            shows once.
        join: of the parts of 64 rows x 128 lanes.
    """

    flops: float
    launch: float
    item: float
    join: float


@dataclass(frozen=True)
class TileRates:
    """Those of all tiles that are weighed.

    Attributes:
        streamed: tiles of 16 rows, by their warps.
        tall: tiles of 64 rows of the portable template.
        hopper: tiles of the Hopper template, by their rows.
    """

    streamed: Mapping[int, Rates]
    tall: Rates
    hopper: Mapping[int, Rates]

    def of(self, tile: TileConfig) -> Rates:
        if tile.template == "hopper":
            return self.hopper[tile.rows]
        return self.tall if tile.rows == 64 else self.streamed[tile.warps]


@dataclass(frozen=True)
class Machine:
    """An architecture.

    Attributes:
        bytes: thousands that an SM reads from memory in a microsecond.
        cached: part of the time of a first read that it takes to read keys again from the cache.
        cache: thousands of bytes of keys, for each SM, that stay in the cache.
        small_heads: rates for heads up to 64 lanes. They have fewer products for each exponential.
        wide_heads: rates for all others.
    """

    bytes: float
    cached: float
    cache: float
    small_heads: TileRates
    wide_heads: TileRates

    def rates(self, spec: AttentionSpec, tile: TileConfig) -> Rates:
        """Those of a tile that is weighed."""
        small = max(spec.head_dim_qk, spec.head_dim_v) <= SMALL_HEADS
        return (self.small_heads if small else self.wide_heads).of(tile)


# Fitted to the sweeps of an NVIDIA H200. Architectures without a record are not here.
MACHINES = {
    "sm_90a": Machine(
        bytes=34.3,
        cached=0.1,
        cache=306,
        small_heads=TileRates(
            streamed={
                4: Rates(flops=0.934, launch=8.91, item=1.1, join=0.0555),
                2: Rates(flops=0.827, launch=7.96, item=1.5, join=17.7),
            },
            tall=Rates(flops=1.85, launch=10.7, item=0.0314, join=11.4),
            hopper={
                128: Rates(flops=3.35, launch=9.17, item=3.17, join=4.31),
                192: Rates(flops=3.44, launch=10.9, item=1.87, join=2.77),
            },
        ),
        wide_heads=TileRates(
            streamed={
                4: Rates(flops=1.2, launch=8.9, item=0.31, join=0.055),
                2: Rates(flops=0.811, launch=7.8, item=1.9, join=8),
            },
            tall=Rates(flops=2.08, launch=14, item=0.028, join=8),
            hopper={128: Rates(flops=5.62, launch=9.2, item=4.2, join=5.8)},
        ),
    )
}


def weighed_tiles(spec: AttentionSpec, arch: Arch) -> list[tuple[int, int, int]]:
    """Rows, keys and warps of the portable tiles to weigh; none where no sweep tells their cost.

    Others that fit were slower in the sweep, or no faster. It had 16-bit keys that nothing
    transforms, and rows that read all keys of their request.
    """
    seats, kv_format = spec.variant.seats, spec.kv_format
    transformed = "key_transform" in seats or "value_transform" in seats or spec.is_narrow
    partly = kv_format.composed or kv_format.column_positions
    if arch.name not in MACHINES or transformed or partly:
        return []
    medium = SMALL_HEADS < max(spec.head_dim_qk, spec.head_dim_v) <= 128
    return [(16, 128, 4), (16, 64, 2), (64, 32, 2) if medium else (64, 64, 4)]


def is_known(tile: TileConfig, work: Work) -> bool:
    """Whether the model holds for a tile and a batch.

    It does not see that a CTA which has an SM alone leaves it idle while an item ends: where an SM
    has several items, decoding was up to 5 % faster with two CTAs.
    """
    alone = tile.template == "portable" and tile.rows == 16 and tile.warps == 4
    return work.rows <= MOST_TILES * tile.rows and not (alone and work.items > 1)


def predicted_us(spec: AttentionSpec, arch: Arch, tile: TileConfig, work: Work) -> float:
    """Time of a batch."""
    machine = MACHINES[arch.name]
    return predicted_with(machine.rates(spec, tile), machine, spec, tile, work)


def predicted_with(
    rates: Rates, machine: Machine, spec: AttentionSpec, tile: TileConfig, work: Work
) -> float:
    """The same with any rates of the tile, on any machine."""
    lanes = spec.head_dim_qk + spec.head_dim_v
    key_bytes = lanes * spec.stored_dtype.bytes
    tiles = math.ceil(work.rows / tile.rows)
    visits = work.items * tiles
    walked = tile.keys * math.ceil(visits * work.keys / tile.keys)  # by the busiest SM
    compute = walked * tile.rows * 2 * lanes / (1e6 * rates.flops)
    first = work.items * work.keys
    cached = tiles >= _SHARING_TILES or first * key_bytes < 1e3 * machine.cache
    again = (tiles - 1) * first * (machine.cached if cached else 1.0)
    memory = (first + again) * key_bytes / (1e3 * machine.bytes)
    joined = min(work.rows, tile.rows) * spec.head_dim_v / _LANES if visits < 1 else 0.0
    shown = min(visits, 1.0) if tile.rows == 16 else visits
    return rates.launch + rates.item * shown + max(compute, memory) + rates.join * joined
