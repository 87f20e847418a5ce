"""Tiles of one fused query row (single.cuh): decoding without groups, and without tensor cores."""

from __future__ import annotations

from collections.abc import Iterator

from warploom.codegen.attention.portable import MOST_REGISTERS, Portable, mask_reads_inputs
from warploom.codegen.attention.shared_memory import (
    Region,
    SharedMemory,
    items_region,
    padded_dims,
)
from warploom.codegen.attention.template import Work
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.lowering.functors import scale_factors
from warploom.codegen.source import TileConfig
from warploom.dsl.types.spec import AttentionSpec

_MORE_REGISTERS_SINCE = (12, 0)  # compute capability from which a thread takes more
_FEWEST_TOKENS = 8  # of a block; pages of 1 were slower and pages of 16 faster than with 16 rows
_WARPS = 4  # small CTAs, two to four on an SM: one ends an item, the others read


class SingleRow(Portable):
    """Keys and values never lie in shared memory."""

    overlaps = False
    remedy = "Use a tile of 16 rows."

    def has(self, tile: TileConfig) -> bool:
        return super().has(tile) and tile.rows == 1

    def obstacle(self, spec: AttentionSpec, tile: TileConfig | None = None) -> str | None:
        """Why there is no tile of one row, or not this one."""
        if tile is not None and tile.keys not in (16 * tile.warps, 32 * tile.warps):
            return f"each warp has 16 or 32 keys, and {tile.warps} are to share {tile.keys}"
        hooks = spec.variant.hooks
        if spec.kv_format.composed:
            return "rows of several requests share a tile of composed plans"
        if "key_transform" in hooks:
            return "a key transform needs staged keys"
        if "value_transform" in hooks and not scale_factors(hooks["value_transform"]):
            return "a value transform that is no scale needs staged values"
        return None

    def tile(self, spec: AttentionSpec) -> TileConfig:
        """The tile for what there is no obstacle to.

        A warp's tile of keys is in its registers: 16 keys if more than 8 lanes share a row, else
        32, so that each lane has eight vectors of keys and of values on their way, or sixteen of
        wide heads.
        """
        lanes = max(spec.head_dim_qk, spec.head_dim_v) * spec.stored_dtype.bytes // 16
        return TileConfig(1, _WARPS * (16 if lanes > 8 else 32), _WARPS, 1)

    def candidates(self, spec: AttentionSpec, arch: Arch, work: Work) -> Iterator[TileConfig]:
        if work.rows <= 1 and not self.passed_over(spec, arch, work):
            yield self.tile(spec)

    def passed_over(self, spec: AttentionSpec, arch: Arch, work: Work) -> str | None:
        """On an H200 pages of 1 cost 5 to 10 % of bandwidth, and tiles of 16 rows nearly nothing.

        16 x 1,024 keys: 3,867 against 4,216 GB/s. Tiles of 16 rows look addresses up ahead.
        """
        if work.rows > 1:
            return None
        obstacle = self.obstacle(spec)
        if not obstacle and _has_small_blocks(spec):
            obstacle = "blocks of few tokens are looked up ahead there"
        return obstacle and f"not one row, since {obstacle}"

    def shifts_rows(self, spec: AttentionSpec) -> bool:
        """No: each lane has one logit, to which the bias is added as it stands."""
        return False

    def registers(self, spec: AttentionSpec, capability: tuple[int, int]) -> int:
        """For vectors on their way, and for what hooks keep.

        A sweep found spills in 128 where logits are transformed, the mask reads inputs, columns are
        listed or blocks have few tokens, each of which has an address of its own. 8-bit vectors
        make twice the numbers. For compute capability 12.0 the compiler needs two more with heads
        of 64 or 96 over pages of 16, too.
        """
        if max(spec.head_dim_qk, spec.head_dim_v) > 128:
            return MOST_REGISTERS
        listed = spec.kv_format.column_positions or _has_small_blocks(spec)
        tight = mask_reads_inputs(spec) or "logits_transform" in spec.variant.hooks
        is_late = capability >= _MORE_REGISTERS_SINCE
        return 168 if tight or spec.is_narrow or listed or is_late else 128

    def launch_bounds(self, spec: AttentionSpec, tile: TileConfig) -> str:
        """Such tiles live in registers; one text serves all devices, so that CTAs are a term."""
        threads = self.threads(tile)
        early, late = (
            self.ctas_by_registers(spec, tile, capability)
            for capability in ((0, 0), _MORE_REGISTERS_SINCE)
        )
        since = 100 * _MORE_REGISTERS_SINCE[0] + 10 * _MORE_REGISTERS_SINCE[1]
        ctas = late if late == early else f"__CUDA_ARCH__ < {since} ? {early} : {late}"
        return f"{threads}, {ctas}"

    def memory(self, spec: AttentionSpec, tile: TileConfig) -> SharedMemory:
        """Two items take turns: the next is opened while the last is written."""
        dim_qk, dim_v = padded_dims(spec)
        return SharedMemory(
            Region("query", 2 * dim_qk),
            Region("slabs", 4 * tile.warps * dim_v),
            Region("statistics", 8 * tile.warps),
            items_region(spec, tile, 2),
        )

    def reason(self, spec: AttentionSpec, tile: TileConfig, arch: Arch, work: Work) -> str:
        ctas = self.launch(spec, tile, arch).ctas_per_sm
        return (
            f"{work}: without tensor cores, {tile.warps} warps keep "
            f"{tile.keys} keys in registers, {ctas} CTAs per SM on {arch.name}"
        )


def _has_small_blocks(spec: AttentionSpec) -> bool:
    return 0 < spec.kv_format.block_kv < _FEWEST_TOKENS
