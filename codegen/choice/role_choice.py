"""Which two tiles a launch of two roles has on a GPU, if any (decisions 0044 and 0054)."""

from __future__ import annotations

from dataclasses import replace

from warploom.codegen.attention.portable import STREAMED_ROWS, TURNED_ROWS
from warploom.codegen.attention.template import Work
from warploom.codegen.attention.templates import HOPPER
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.spec import AttentionSpec

MANY_ROWS = 64  # fused rows; a request with more is a prefill
_WARP_KEYS = 32  # keys of a streaming warp; each lane looks up one
_MOST_WARPS = 11  # of the 12 warps of three groups, one is for prefetching
# Lanes of heads. With 48, 80 and 112 two roles took longer than two wrappers in turn, and with 80
# and 112 than one tile, by prices in proportion to lanes.
_LANES = (64, 96, 128)
FULL_LANES = 128
# Hooks that the computing warps run at each key tile; they transform queries once per item. Fused
# RoPE took longer this way beside decodes than two wrappers with a transforming group of warps
# (decision 0044).
_SLOW_HOOKS = {"key_transform", "value_transform"}
_REASON = "requests of few rows and of many: decodes stream keys on some SMs while others compute"


def role_choices(spec: AttentionSpec, arch: Arch, group_size: int) -> tuple[TileChoice, ...]:
    """Tiles for batches that mix decodes and prefills; none if one tile serves such batches.

    Choices whose decode tile has the fewest rows come first: they are faster if the tile holds all
    rows of the decodes; requests with more rows count as prefills.

    A decode tile has as many warps as shared memory allows: each warp loads its own keys.

    Args:
        spec: what to compute.
        arch: target architecture.
        group_size: query heads of a key/value head: the rows of a decode.
    """
    if _not_measured(spec):
        return ()
    found = (_choice(spec, arch, rows) for rows in _heights(spec, group_size))
    return tuple(choice for choice in found if choice is not None)


def role_obstacle(spec: AttentionSpec, arch: Arch, group_size: int) -> str | None:
    """Why `role_choices` returns none, for `explain()`; None if it returns some."""
    if role_choices(spec, arch, group_size):
        return None
    if not HOPPER.compiles_for(arch):
        return f"two roles are not measured on {arch.name}"
    if why := _not_measured(spec) or HOPPER.passed_over(spec, arch, Work(MANY_ROWS + 1)):
        return why
    if not _heights(spec, group_size):
        return f"a decode has {group_size} rows, more than the tiles of decodes that are chosen"
    return "shared memory holds no two tiles"


def _not_measured(spec: AttentionSpec) -> str | None:
    """What in the spec made two roles slower, or was not measured; None if nothing."""
    lanes = (FULL_LANES,) if spec.kv_format.composed else _LANES
    if spec.head_dim_qk != spec.head_dim_v or spec.head_dim_v not in lanes:
        known = ", ".join(map(str, lanes))
        return f"two roles pay less, or are not measured, for heads of other lanes than {known}"
    if slow := _SLOW_HOOKS & spec.variant.hooks.keys():
        return f"{' and '.join(sorted(slow))} would run at each tile of keys of a decode"
    return None


def _heights(spec: AttentionSpec, group_size: int) -> list[int]:
    """Candidate rows of the decode tile.

    In composed plans, decode tiles of 16 rows took 1.04 to 1.09 times as long as one tile for all
    on an H200, by any prices (docs/experiments/mixed-plans.md, "Prices of other heads").
    """
    heights = (TURNED_ROWS,) if spec.kv_format.composed else (TURNED_ROWS, STREAMED_ROWS)
    return [rows for rows in heights if group_size <= rows]


def _choice(spec: AttentionSpec, arch: Arch, rows: int) -> TileChoice | None:
    for tall in HOPPER.tiles(spec, arch, Work(MANY_ROWS + 1)):
        for warps in range(_MOST_WARPS, 0, -1):
            streamed = TileConfig(rows, _WARP_KEYS * warps, warps, stages=2)
            tile = replace(tall, decode=streamed)
            if HOPPER.obstacle(spec, tile):
                continue
            if HOPPER.launch(spec, tile, arch).shared_bytes <= arch.shared_per_cta:
                return TileChoice(tile, _REASON)
    return None
