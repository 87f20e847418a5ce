"""The portable template (`mma.sync`, `cp.async`), and its tiles of 64 rows and more.

Sizes follow FlashAttention-2 and FlashInfer (section 3.2.2): the row tile is the smallest of 16, 64
and 128 that holds the mean number of fused rows of a request, and the rest is what fits the
architecture and, for few rows, how many items there are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from warploom.codegen.attention.shared_memory import (
    TILE_ALIGN,
    Overlay,
    Region,
    SharedMemory,
    items_region,
    padded_dims,
)
from warploom.codegen.attention.template import SMALL_HEADS, CudaTemplate, Work
from warploom.codegen.compilers.arch import REGISTERS_PER_SM, Arch
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.lowering.functors import scale_factors
from warploom.codegen.sizes import round_up
from warploom.codegen.source import TileConfig
from warploom.dsl.types.ir import walk
from warploom.dsl.types.spec import AttentionSpec

_WARP = 32
MOST_REGISTERS = 255  # of a thread
STREAMED_ROWS = 16  # of tiles whose warps share the rows (streamed.py)
_RESERVED_BYTES = 1024  # of shared memory, by the system for each CTA


class Portable(CudaTemplate):
    """What the kernels of portable.cu.j2 have in common."""

    name = "portable"

    def threads(self, tile: TileConfig) -> int:
        """Threads of a CTA."""
        return tile.warps * _WARP

    def registers(self, spec: AttentionSpec, capability: tuple[int, int]) -> int:
        """Registers of a thread, at most, on devices of a compute capability."""
        return MOST_REGISTERS

    def launch(self, spec: AttentionSpec, tile: TileConfig, arch: Arch) -> LaunchShape:
        self.check(spec, tile)
        threads, shared = self.threads(tile), self.memory(spec, tile).bytes
        ctas = min(
            arch.shared_per_sm // (shared + _RESERVED_BYTES),
            arch.registers_per_sm // (self.registers(spec, arch.capability) * threads),
            arch.threads_per_sm // threads,
        )
        return LaunchShape(threads, shared, ctas, arch.overlaps and self.overlaps)


class Staged(Portable):
    """Kernels that stage keys in shared memory, for the tensor cores."""

    @abstractmethod
    def share(self, tile: TileConfig) -> str:
        """What of a tile each warp has, in words."""

    def reason(self, spec: AttentionSpec, tile: TileConfig, arch: Arch, work: Work) -> str:
        shape = self.launch(spec, tile, arch)
        return (
            f"{work}: {tile.rows} rows, {self.share(tile)}; "
            f"{tile.keys} keys in {tile.stages} stages take {shape.shared_bytes / 1024:.4g} "
            f"KiB of shared memory, of {arch.shared_per_cta // 1024} on {arch.name}: "
            f"{shape.ctas_per_sm} CTAs per SM"
        )

    def memory(self, spec: AttentionSpec, tile: TileConfig) -> SharedMemory:
        """Where keys stream from item to item, nothing takes the place of anything."""
        walked, output = _walked(spec, tile, 1 + self.streams), _output(spec, tile)
        items = items_region(spec, tile, 4 if self.streams else 1)
        if self.streams:
            return SharedMemory(*walked, *output, items)
        return SharedMemory(Overlay(walked, output), items)


class Tall(Staged):
    """64 or 128 rows: each warp has its own, and all see the same keys."""

    def launch_bounds(self, spec: AttentionSpec, tile: TileConfig) -> str:
        """As many CTAs as leave a thread all registers.

        Not told, the compiler may save some for more CTAs, and spill.
        """
        threads = self.threads(tile)
        return f"{threads}, {REGISTERS_PER_SM // (MOST_REGISTERS * threads)}"

    def candidates(self, spec: AttentionSpec, arch: Arch, work: Work) -> Iterator[TileConfig]:
        """In the order of speed on an H200.

        One tile of keys is copied while another is used: two stages are the least. 32 rows per warp
        halve the reads of keys from shared memory, but the output of wide heads would not fit the
        registers then.
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
        """The best first: by an SM with all its CTAs, first one number, then the warps.

        Many rows wait for the tensor cores and shared memory, so that rows which use the same keys
        count.
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

    def share(self, tile: TileConfig) -> str:
        return f"each of {tile.warps} warps has {tile.rows // tile.warps} rows"


def mask_reads_inputs(spec: AttentionSpec) -> bool:
    """True if the mask reads fields, and not positions alone."""
    mask = spec.variant.hooks.get("logits_mask")
    return mask is not None and any(found.op in ("load", "scalar") for found in walk(mask))


def _needs_registers(spec: AttentionSpec, arch: Arch) -> bool:
    """True if hooks on logits leave the largest tiles too few registers.

    A sweep found spills where logits are transformed or the mask reads inputs, and on newer
    architectures with any mask.
    """
    hooks = spec.variant.hooks
    if "logits_mask" not in hooks or "logits_transform" in hooks:
        return "logits_transform" in hooks
    return mask_reads_inputs(spec) or arch.capability >= (10, 0)


def _walked(spec: AttentionSpec, tile: TileConfig, query_tiles: int) -> list[Region]:
    """What is needed while keys are walked."""
    dim_qk, dim_v = padded_dims(spec)
    hooks = spec.variant.hooks
    # Hooks make 16-bit numbers of a whole tile.
    new_keys = spec.is_narrow and "key_transform" in hooks
    scales_weights = scale_factors(hooks.get("value_transform")) and spec.dtype.name != "float16"
    new_values = spec.is_narrow and "value_transform" in hooks and not scales_weights
    key, value = (
        (round_up(spec.head_dim_qk, 64), round_up(spec.head_dim_v, 64))
        if spec.is_narrow
        else (2 * dim_qk, 2 * dim_v)
    )
    # What was looked up for a tile is needed until its turn has passed.
    looked_up = (tile.stages + 1) * tile.keys
    return [
        Region("queries", query_tiles * tile.rows * 2 * dim_qk, TILE_ALIGN),
        Region("keys", tile.stages * tile.keys * key, TILE_ALIGN),
        Region("values", tile.stages * tile.keys * value, TILE_ALIGN),
        Region("wide_keys", new_keys * tile.keys * 2 * dim_qk, TILE_ALIGN),
        Region("wide_values", new_values * tile.keys * 2 * dim_v, TILE_ALIGN),
        Region("addresses", 16 * looked_up if spec.kv_format.block_kv else 0),
        Region("positions", 4 * looked_up if spec.kv_format.column_positions else 0),
    ]


def _output(spec: AttentionSpec, tile: TileConfig) -> list[Region]:
    """What is needed after it: rows of fp32, 16 of each warp, and what their softmax has found.

    8 floats of padding put the rows that one store touches into different banks.
    """
    rows, (_, dim_v) = 16 * tile.warps, padded_dims(spec)
    return [Region("slabs", 4 * rows * (dim_v + 8)), Region("statistics", 8 * rows)]
