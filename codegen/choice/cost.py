"""The time of a batch with a tile: a model with few rates, fitted to a recorded sweep.

An SM walks keys. For each key it computes with all rows of the tile, padding included, and it reads
the key's bytes; the slower of the two counts. Added to that are the launch, the cost of a query
tile beside its keys, and, where tiles are cut so that all SMs have work, merging the parts. All
times are in microseconds, all amounts are per SM. `benchmarks/results/tile_sweep.jsonl` is the
record; heads up to 64 lanes have `tile_sweep_small_heads.jsonl`, to which `benchmarks/fit_tiles.py`
fits separate rates. Templates hold the rates (`CudaTemplate.recorded`). A test compares the choices
with both records.
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

_SHARING_TILES = 4  # query tiles per request from which on the planner lets them share cache
_LANES = 128 * 64  # `Rates.merge` is for this product of lanes and rows


@dataclass(frozen=True)
class Machine:
    """The memory of an architecture.

    Attributes:
        bytes: thousands of bytes that an SM reads from memory in a microsecond.
        cached: time to read keys again from the cache, as a fraction of the first read.
        cache: thousands of bytes of keys, per SM, that stay in the cache.
    """

    bytes: float
    cached: float
    cache: float


# Fitted to the sweeps of an NVIDIA H200. Architectures without a record are missing.
MACHINES = {"sm_90a": Machine(bytes=34.3, cached=0.1, cache=306)}


def is_covered(spec: AttentionSpec, arch: Arch) -> bool:
    """Whether the recorded sweep covers this spec and architecture.

    The sweep had 16-bit keys without transforms, and rows that read all keys of their request.
    Tiles that fit, but are not weighed, were slower in it, or no faster.
    """
    hooks, kv_format = spec.variant.hooks, spec.kv_format
    transformed = "key_transform" in hooks or "value_transform" in hooks or spec.is_narrow
    partly = kv_format.composed or kv_format.column_positions
    return arch.name in MACHINES and not transformed and not partly


def predicted_us(spec: AttentionSpec, arch: Arch, tile: TileConfig, work: Work) -> float:
    """Predicted time of a batch, in microseconds."""
    machine = MACHINES[arch.name]
    return predicted_with(template_of(tile).rates(spec, tile, arch), machine, spec, tile, work)


def predicted_with(
    rates: Rates, machine: Machine, spec: AttentionSpec, tile: TileConfig, work: Work
) -> float:
    """`predicted_us` with given rates and machine."""
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
