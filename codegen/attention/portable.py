"""The portable template (`mma.sync`, `cp.async`): the common part of its kernels.

Sizes follow FlashAttention-2 and FlashInfer (section 3.2.2): the row tile is the smallest of 16, 64
and 128 that holds the mean number of fused rows of a request. The other sizes depend on what fits
the architecture and, for few rows, on the number of items.
"""

from __future__ import annotations

from abc import abstractmethod

from warploom.codegen.attention.shared_memory import (
    TILE_ALIGN,
    Overlay,
    Region,
    SharedMemory,
    items_region,
    padded_dims,
)
from warploom.codegen.attention.template import CudaTemplate, Work
from warploom.codegen.compilers.arch import REGISTERS_PER_SM, Arch
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.lowering.functors import scale_factors
from warploom.codegen.sizes import round_up
from warploom.codegen.source import TileConfig
from warploom.dsl.types.ir import walk
from warploom.dsl.types.spec import AttentionSpec

_WARP = 32
MOST_REGISTERS = 255  # of a thread
STREAMED_ROWS = 16  # most rows of tiles whose warps share the rows (streamed.py)
TURNED_ROWS = 8  # rows of such tiles if their rows are the columns of products
_BARRIER_BYTES = 8
_RESERVED_BYTES = 1024  # shared memory that the system reserves for each CTA


class Portable(CudaTemplate):
    """The common part of the kernels of portable.cu.j2."""

    name = "portable"

    def threads(self, tile: TileConfig) -> int:
        """Threads of a CTA."""
        return tile.warps * _WARP

    def registers(self, spec: AttentionSpec, capability: tuple[int, int]) -> int:
        """Most registers of a thread on devices of a compute capability."""
        return MOST_REGISTERS

    def ctas_by_registers(
        self, spec: AttentionSpec, tile: TileConfig, capability: tuple[int, int]
    ) -> int:
        """CTAs that fit an SM's registers; at least one, since the compiler spills the rest."""
        needed = self.registers(spec, capability) * self.threads(tile)
        return max(1, REGISTERS_PER_SM // needed)

    def shared_bytes(self, spec: AttentionSpec, tile: TileConfig) -> int:
        """Shared memory of a CTA."""
        return self.memory(spec, tile).bytes

    def launch(self, spec: AttentionSpec, tile: TileConfig, arch: Arch) -> LaunchShape:
        self.check(spec, tile)
        threads, shared = self.threads(tile), self.shared_bytes(spec, tile)
        ctas = min(
            arch.shared_per_sm // (shared + _RESERVED_BYTES),
            self.ctas_by_registers(spec, tile, arch.capability),
            arch.threads_per_sm // threads,
        )
        return LaunchShape(threads, shared, ctas, arch.overlaps and self.overlaps)


class Staged(Portable):
    """Kernels that stage keys in shared memory, for the tensor cores."""

    def copies_boxes(self, spec: AttentionSpec, tile: TileConfig) -> bool:
        """Whether tensor copies bring streamed keys, each the part of a tile in one block."""
        return False

    @abstractmethod
    def of_each_warp(self, tile: TileConfig) -> str:
        """The share of a tile that each warp has, in words."""

    def reason(self, spec: AttentionSpec, tile: TileConfig, arch: Arch, work: Work) -> str:
        shape = self.launch(spec, tile, arch)
        return (
            f"{work}: {tile.rows} rows, {self.of_each_warp(tile)}; "
            f"{tile.keys} keys in {tile.stages} stages take {shape.shared_bytes / 1024:.4g} "
            f"KiB of shared memory, of {arch.shared_per_cta // 1024} on {arch.name}: "
            f"{shape.ctas_per_sm} CTAs per SM"
        )

    def memory(self, spec: AttentionSpec, tile: TileConfig) -> SharedMemory:
        """The output overlays the tiles, except where keys stream from item to item."""
        in_boxes = self.copies_boxes(spec, tile)
        walked, output = _walked(spec, tile, 1 + self.streams, in_boxes), _output(spec, tile)
        items = items_region(spec, tile, 4 if self.streams else 1)
        if self.streams:
            return SharedMemory(*walked, *output, items)
        return SharedMemory(Overlay(walked, output), items)


def stages_obstacle(tile: TileConfig) -> str | None:
    """Why keys cannot be staged with the tile's number of stages, or None."""
    if tile.stages < 2:
        return "one tile of keys is copied while another is used, and it has one stage"
    return None


def mask_reads_inputs(spec: AttentionSpec) -> bool:
    """True if the mask reads fields, and not only positions."""
    mask = spec.variant.hooks.get("logits_mask")
    return mask is not None and any(found.op in ("load", "scalar") for found in walk(mask))


def _scales_weights(spec: AttentionSpec) -> bool:
    """Whether scales of values are applied to weights: `kScalesWeights` of staging/tile.cuh."""
    if spec.max_scores or not scale_factors(spec.variant.hooks.get("value_transform")):
        return False
    return spec.dtype.name != "float16" or (spec.is_narrow and spec.variant.softmax)


def _walked(
    spec: AttentionSpec, tile: TileConfig, query_tiles: int, in_boxes: bool
) -> list[Region]:
    """Regions that are needed during the loop over key tiles."""
    dim_qk, dim_v = padded_dims(spec)
    hooks = spec.variant.hooks
    # Hooks convert a whole 8-bit tile to 16-bit numbers.
    new_keys = spec.is_narrow and "key_transform" in hooks
    new_values = spec.is_narrow and "value_transform" in hooks and not _scales_weights(spec)
    key, value = (
        (round_up(spec.head_dim_qk, 64), round_up(spec.head_dim_v, 64))
        if spec.is_narrow
        else (2 * dim_qk, 2 * dim_v)
    )
    # Addresses and positions that were looked up for a tile are needed until it has been used.
    looked_up = (tile.stages + 1) * tile.keys
    return [
        Region("queries", query_tiles * tile.rows * 2 * dim_qk, TILE_ALIGN),
        Region("keys", tile.stages * tile.keys * key, TILE_ALIGN),
        Region("values", tile.stages * tile.keys * value, TILE_ALIGN),
        Region("wide_keys", new_keys * tile.keys * 2 * dim_qk, TILE_ALIGN),
        Region("wide_values", new_values * tile.keys * 2 * dim_v, TILE_ALIGN),
        Region("landed", in_boxes * _BARRIER_BYTES * tile.stages * tile.warps),
        Region("addresses", 16 * looked_up if spec.kv_format.block_kv and not in_boxes else 0),
        Region("positions", 4 * looked_up if spec.kv_format.column_positions else 0),
    ]


def _output(spec: AttentionSpec, tile: TileConfig) -> list[Region]:
    """Regions that are needed after the loop: 16 or 8 fp32 rows per warp, and softmax statistics.

    8 floats of padding put the rows that one store touches into different banks.
    """
    rows, (_, dim_v) = min(tile.rows, 16) * tile.warps, padded_dims(spec)
    return [Region("slabs", 4 * rows * (dim_v + 8)), Region("statistics", 8 * rows)]
