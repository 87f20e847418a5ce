"""Which two tiles a launch of two roles has on a GPU, or that it has none (decision 0044)."""

from __future__ import annotations

from dataclasses import replace

from warploom.codegen.attention.template import Work
from warploom.codegen.attention.templates import HOPPER
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.spec import AttentionSpec

FEW_ROWS, MANY_ROWS = 16, 64  # fused, of a request: at most for decode, and more for prefill
_WARP_KEYS = 32  # of a warp that streams; each looks up one
_LANES = 128  # of heads that were measured; wider ones stream with more registers than there are
_REASON = "requests of few rows and of many: decodes stream keys on some SMs while others compute"


def role_choice(spec: AttentionSpec, arch: Arch) -> TileChoice | None:
    """Tiles for batches that mix decodes and prefills; None if one tile serves such batches.

    Groups that transform staged rows, and wide heads, leave decodes too few registers.

    Args:
        spec: what to compute.
        arch: where.
    """
    if (spec.head_dim_qk, spec.head_dim_v) != (_LANES, _LANES) or spec.kv_format.composed:
        return None
    tall = [tile for tile in HOPPER.tiles(spec, arch, Work(MANY_ROWS + 1)) if tile.rows == 128]
    most = [
        replace(tile, decode=TileConfig(FEW_ROWS, _WARP_KEYS * warps, warps, 2))
        for tile in tall
        for warps in range(11, 0, -1)
    ]
    for tile in most:
        if HOPPER.obstacle(spec, tile) or HOPPER.threads(spec, tile) > 384:
            continue
        if HOPPER.launch(spec, tile, arch).shared_bytes <= arch.shared_per_cta:
            return TileChoice(tile, _REASON)
    return None
