"""What a batch costs with a tile: a model of few rates, fitted to a recorded sweep.

An SM walks keys. For each key it computes with all rows of the tile, padding included, and it reads
the key's bytes; the slower of the two counts. To that come a launch, what a query tile costs beside
its keys, and, where tiles are cut for all SMs to have work, merging the parts. All times are in
microseconds, all amounts those of one SM. `benchmarks/results/tile_sweep.jsonl` is the record, and
`tile_sweep_small_heads.jsonl` that of heads up to 64 lanes, to which `benchmarks/fit_tiles.py` fits
rates of their own. A test compares the choices with both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from warploom.codegen.attention.template import SMALL_HEADS, Work
from warploom.codegen.attention.templates import template_of
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileConfig
from warploom.dsl.types.spec import AttentionSpec

_SHARING_TILES = 4  # query tiles of a request from which on the planner lets them share the cache
_LANES = 128 * 64  # the product of lanes and rows that `Rates.merge` is for


@dataclass(frozen=True)
class Rates:
    """One kind of tile on one architecture.

    Attributes:
        flops: millions of operations in a microsecond.
        launch: time of a batch that has next to nothing to do.
        item: of a query tile, beside its keys. Where a template streams on to the next, it shows
            once.
        merge: of the parts of 64 rows x 128 lanes.
    """

    flops: float
    launch: float
    item: float
    merge: float


@dataclass(frozen=True)
class Machine:
    """An architecture.

    Attributes:
        bytes: thousands that an SM reads from memory in a microsecond.
        cached: part of the time of a first read that it takes to read keys again from the cache.
        cache: thousands of bytes of keys, for each SM, that stay in the cache.
        small_heads: for heads up to 64 lanes, rates by the kind of a tile (`CudaTemplate.kind`).
            They have fewer products for each exponential.
        wide_heads: for all others.
    """

    bytes: float
    cached: float
    cache: float
    small_heads: Mapping[str, Rates]
    wide_heads: Mapping[str, Rates]

    def rates(self, spec: AttentionSpec, tile: TileConfig) -> Rates:
        """Those of a tile that is weighed."""
        small = max(spec.head_dim_qk, spec.head_dim_v) <= SMALL_HEADS
        return (self.small_heads if small else self.wide_heads)[template_of(tile).kind(tile)]


# Fitted to the sweeps of an NVIDIA H200. Architectures without a record are not here.
MACHINES = {
    "sm_90a": Machine(
        bytes=34.3,
        cached=0.1,
        cache=306,
        small_heads={
            "streamed by 4": Rates(flops=0.934, launch=8.91, item=1.1, merge=0.0555),
            "streamed by 2": Rates(flops=0.827, launch=7.96, item=1.5, merge=17.7),
            "tall": Rates(flops=1.85, launch=10.7, item=0.0314, merge=11.4),
            "hopper 128": Rates(flops=3.35, launch=9.17, item=3.17, merge=4.31),
            "hopper 192": Rates(flops=3.44, launch=10.9, item=1.87, merge=2.77),
        },
        wide_heads={
            "streamed by 4": Rates(flops=1.2, launch=8.9, item=0.31, merge=0.055),
            "streamed by 2": Rates(flops=0.811, launch=7.8, item=1.9, merge=8),
            "tall": Rates(flops=2.08, launch=14, item=0.028, merge=8),
            "hopper 128": Rates(flops=5.62, launch=9.2, item=4.2, merge=5.8),
        },
    )
}


def is_covered(spec: AttentionSpec, arch: Arch) -> bool:
    """Whether a sweep tells what tiles cost here.

    It had 16-bit keys that nothing transforms, and rows that read all keys of their request. Tiles
    that fit, but are not weighed, were slower in it, or no faster.
    """
    hooks, kv_format = spec.variant.hooks, spec.kv_format
    transformed = "key_transform" in hooks or "value_transform" in hooks or spec.is_narrow
    partly = kv_format.composed or kv_format.column_positions
    return arch.name in MACHINES and not transformed and not partly


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
    merged = min(work.rows, tile.rows) * spec.head_dim_v / _LANES if visits < 1 else 0.0
    shown = min(visits, 1.0) if template_of(tile).streams else visits
    return rates.launch + rates.item * shown + max(compute, memory) + rates.merge * merged
