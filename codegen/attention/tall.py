"""Tiles of the portable template with 64 rows or more."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from warploom.codegen.attention.portable import (
    STREAMED_ROWS,
    Staged,
    mask_reads_inputs,
    stages_obstacle,
)
from warploom.codegen.attention.rates import ComposedRates, Rates, Recorded, TileSizes
from warploom.codegen.attention.template import SMALL_HEADS, Work
from warploom.codegen.attention.two_roles import TwoRoles
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileConfig
from warploom.dsl.types.spec import AttentionSpec

_ON_H200 = Recorded(
    small_heads={"tall": Rates(flops=1.85, launch=10.7, item=0.0314, merge=11.4)},
    wide_heads={"tall": Rates(flops=2.08, launch=14, item=0.028, merge=8)},
    composed={TileSizes(64, 32, 2): ComposedRates(launch=18, read=3.05, walk=15.3, item=0.864)},
)


class Tall(TwoRoles, Staged):
    """Tiles of 64 or 128 rows: each warp has its own rows, and all warps use the same keys."""

    prefill_ps, narrow_ps = 3_300_000, 5_700_000  # prefill_ps follows from FLOPs, not measured
    recorded = MappingProxyType({"sm_90a": _ON_H200})
    remedy = "Use a tile such as TileConfig(64, 64, warps=4) or TileConfig(128, 64, warps=4)."

    def obstacle(self, spec: AttentionSpec, tile: TileConfig) -> str | None:
        if tile.rows not in (16 * tile.warps, 32 * tile.warps):
            return f"each warp has 16 or 32 rows, and {tile.warps} are to share {tile.rows}"
        if tile.warps & (tile.warps - 1):  # warps copy keys in rounds
            return f"warps are a power of two, and it has {tile.warps}"
        if tile.keys % 16 or tile.keys > 32 * tile.warps:
            return f"keys are a multiple of 16, at most one for each of {32 * tile.warps} threads"
        return stages_obstacle(tile) or self.role_obstacle(spec, tile)

    def joins_keys(self, tile: TileConfig) -> bool:
        """False for 32 rows per warp, which leave no registers for the words of bits."""
        return tile.rows == 16 * tile.warps

    def cta_threads(self, spec: AttentionSpec, tile: TileConfig) -> int:
        return self.threads(tile)

    def launch_bounds(self, spec: AttentionSpec, tile: TileConfig) -> str:
        """Threads, and as many CTAs as leave a thread all registers.

        Without this number the compiler may save registers for more CTAs, and spill.
        """
        # `registers` returns the same on all devices
        return f"{self.threads(tile)}, {self.ctas_by_registers(spec, tile, (0, 0))}"

    def candidates(self, spec: AttentionSpec, arch: Arch, work: Work) -> Iterator[TileConfig]:
        """Tiles to try, in the order of their speed on an H200.

        They have two stages, the fewest: one tile of keys is copied while another is used. 32 rows
        per warp halve the reads of keys from shared memory, but then the output of wide heads would
        not fit into registers.
        """
        if work.rows <= STREAMED_ROWS:
            return
        widest = max(spec.head_dim_qk, spec.head_dim_v)
        if work.rows > 64 and widest <= 128 and not spec.is_narrow:
            tight = _needs_registers(spec, arch)
            if widest <= 64 and not tight:
                yield TileConfig(128, 128, 4, 2)
            if widest <= 64 or not tight:
                yield TileConfig(128, 64, 4, 2)
            yield TileConfig(128, 32, 4, 2)
        if work.rows > 64:
            yield from (TileConfig(128, keys, 8, 2) for keys in (64, 32))
        if widest <= 128:
            yield TileConfig(64, 32, 2, 2)
        yield from (TileConfig(64, keys, 4, 2) for keys in (32, 64))

    def tiles(self, spec: AttentionSpec, arch: Arch, work: Work) -> list[TileConfig]:
        """The best first: by the rows that all CTAs of an SM hold, then by their warps.

        Tiles of many rows wait for tensor cores and shared memory, so the number of rows that use
        the same keys counts.
        """

        def merit(tile: TileConfig) -> tuple[int, int]:
            ctas = self.launch(spec, tile, arch).ctas_per_sm
            return ctas * tile.rows, ctas * tile.warps

        return sorted(super().tiles(spec, arch, work), key=merit, reverse=True)  # stable

    def weighed(self, spec: AttentionSpec, arch: Arch) -> list[TileConfig]:
        medium = SMALL_HEADS < max(spec.head_dim_qk, spec.head_dim_v) <= 128
        sizes = (64, 32, 2, 2) if medium else (64, 64, 4, 2)
        return self.fitting(spec, arch, [TileConfig(*sizes)])

    def kind(self, tile: TileConfig) -> str:
        return "tall"

    def of_each_warp(self, tile: TileConfig) -> str:
        return f"each of {tile.warps} warps has {tile.rows // tile.warps} rows"


def _needs_registers(spec: AttentionSpec, arch: Arch) -> bool:
    """True if hooks on logits leave the largest tiles too few registers.

    A sweep found spills where logits are transformed or the mask reads inputs, and on newer
    architectures (10.0 on) with any mask.
    """
    hooks = spec.variant.hooks
    if "logits_mask" not in hooks or "logits_transform" in hooks:
        return "logits_transform" in hooks
    return mask_reads_inputs(spec) or arch.capability >= (10, 0)
