"""Tiles of one fused query row (single.cuh): decoding without head groups and tensor cores."""

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

_MORE_REGISTERS_SINCE = (12, 0)  # compute capability from which on a thread needs more registers
_FEWEST_TOKENS = 8  # per block; pages of 1 were slower and pages of 16 faster than with 16 rows
_WARPS = 4  # small CTAs, two to four on an SM: while one ends an item, the others read


class SingleRow(Portable):
    """Kernels that keep keys and values in registers, never in shared memory."""

    overlaps = False
    remedy = "Use a tile of 16 rows."

    def has(self, tile: TileConfig) -> bool:
        return super().has(tile) and tile.rows == 1

    def obstacle(self, spec: AttentionSpec, tile: TileConfig | None = None) -> str | None:
        """Why a spec has no tile of one row, or not this tile; None if it has."""
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
        """The tile for a spec without an obstacle.

        A warp holds its tile of keys in registers: 16 keys if more than 8 lanes share a row, else
        32. So each lane has eight vectors of keys and of values in flight, or sixteen for wide
        heads.
        """
        lanes = max(spec.head_dim_qk, spec.head_dim_v) * spec.stored_dtype.bytes // 16
        return TileConfig(1, _WARPS * (16 if lanes > 8 else 32), _WARPS, 1)

    def candidates(self, spec: AttentionSpec, arch: Arch, work: Work) -> Iterator[TileConfig]:
        if work.rows <= 1 and not self.passed_over(spec, arch, work):
            yield self.tile(spec)

    def passed_over(self, spec: AttentionSpec, arch: Arch, work: Work) -> str | None:
        """Why a batch of one row gets another tile; small blocks are one reason.

        On an H200, pages of 1 cost these tiles 5 to 10 % of bandwidth, and tiles of 16 rows, which
        look addresses up ahead, nearly nothing (16 x 1,024 keys: 3,867 against 4,216 GB/s).
        """
        if work.rows > 1:
            return None
        obstacle = self.obstacle(spec)
        if not obstacle and _has_small_blocks(spec):
            obstacle = "blocks of few tokens are looked up ahead there"
        return obstacle and f"not one row, since {obstacle}"

    def shifts_rows(self, spec: AttentionSpec) -> bool:
        """False: each lane has one logit, and the bias is added to it directly."""
        return False

    def registers(self, spec: AttentionSpec, capability: tuple[int, int]) -> int:
        """Registers for vectors in flight, and for values that hooks keep.

        With 128 registers a sweep found spills where logits are transformed, the mask reads inputs,
        columns are listed, or blocks have few tokens, each of which has its own address. An 8-bit
        vector holds twice as many numbers. For compute capability 12.0 the compiler needs two more
        registers also with heads of 64 or 96 over pages of 16.
        """
        if max(spec.head_dim_qk, spec.head_dim_v) > 128:
            return MOST_REGISTERS
        listed = spec.kv_format.column_positions or _has_small_blocks(spec)
        tight = mask_reads_inputs(spec) or "logits_transform" in spec.variant.hooks
        is_late = capability >= _MORE_REGISTERS_SINCE
        return 168 if tight or spec.is_narrow or listed or is_late else 128

    def launch_bounds(self, spec: AttentionSpec, tile: TileConfig) -> str:
        """Threads and CTAs, a C++ term: registers limit them, and one source serves all devices."""
        threads = self.threads(tile)
        early, late = (
            self.ctas_by_registers(spec, tile, capability)
            for capability in ((0, 0), _MORE_REGISTERS_SINCE)
        )
        since = 100 * _MORE_REGISTERS_SINCE[0] + 10 * _MORE_REGISTERS_SINCE[1]
        ctas = late if late == early else f"__CUDA_ARCH__ < {since} ? {early} : {late}"
        return f"{threads}, {ctas}"

    def memory(self, spec: AttentionSpec, tile: TileConfig) -> SharedMemory:
        """The layout, with room for two items: the next is opened while the last is written."""
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
