"""What a batch costs with a tile: a model of few rates, fitted to a recorded sweep.

An SM walks keys. For each key it computes with all rows of the tile, padding included, and it reads
the key's bytes; the slower of the two counts. To that come a launch, what a query tile costs beside
its keys, and, where tiles are cut for all SMs to have work, merging the parts. All times are in
microseconds, all amounts those of one SM. `benchmarks/results/tile_sweep.jsonl` is the record, and
`tile_sweep_small_heads.jsonl` that of heads up to 64 lanes, to which `benchmarks/fit_tiles.py` fits
rates of their own. Templates have them (`CudaTemplate.recorded`). A test compares the choices with
both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from warploom.codegen.attention.rates import Rates
from warploom.codegen.attention.template import Work
from warploom.codegen.attention.templates import template_of
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileConfig
from warploom.dsl.types.spec import AttentionSpec

_SHARING_TILES = 4  # query tiles of a request from which on the planner lets them share the cache
_LANES = 128 * 64  # the product of lanes and rows that `Rates.merge` is for


@dataclass(frozen=True)
class Machine:
    """The memory of an architecture.

    Attributes:
        bytes: thousands that an SM reads from memory in a microsecond.
        cached: part of the time of a first read that it takes to read keys again from the cache.
        cache: thousands of bytes of keys, for each SM, that stay in the cache.
    """

    bytes: float
    cached: float
    cache: float


# Fitted to the sweeps of an NVIDIA H200. Architectures without a record are not here.
MACHINES = {"sm_90a": Machine(bytes=34.3, cached=0.1, cache=306)}


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
    return predicted_with(template_of(tile).rates(spec, tile, arch), machine, spec, tile, work)


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
