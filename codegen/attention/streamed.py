"""Tiles of 16 or 8 rows (stream.cuh), which all warps share; keys stream from item to item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

from warploom.codegen.attention.portable import (
    MOST_REGISTERS,
    STREAMED_ROWS,
    TURNED_ROWS,
    Staged,
    stages_obstacle,
)
from warploom.codegen.attention.rates import ComposedRates, Rates, Recorded, TileSizes
from warploom.codegen.attention.template import Work
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileConfig
from warploom.dsl.types.spec import AttentionSpec

_BOXES = (8, 16)  # tokens
_ON_H200 = Recorded(
    small_heads={
        "streamed by 4": Rates(flops=0.934, launch=8.91, item=1.1, merge=0.0555),
        "streamed by 2": Rates(flops=0.827, launch=7.96, item=1.5, merge=17.7),
    },
    wide_heads={
        "streamed by 4": Rates(flops=1.2, launch=8.9, item=0.31, merge=0.055),
        "streamed by 2": Rates(flops=0.811, launch=7.8, item=1.9, merge=8),
    },
    composed={TileSizes(16, 64, 2): ComposedRates(launch=12.7, read=6.52, walk=9.44, item=0.325)},
)


class Streamed(Staged):
    """Kernels for decoding and appending; one additional warp opens items.

    Attributes:
        sm_bandwidth: GB/s that one SM of an H200 reads while other SMs compute, by the rows of the
            tile: in inverse proportion to the instructions of a key tile (540 and 751). Tiles of 8
            rows read 60 by tensor copies and 58 by addresses.
        narrow_sm_bandwidth: the same for 8-bit keys and values, which need as many instructions.
    """

    streams = True
    recorded = MappingProxyType({"sm_90a": _ON_H200})
    sm_bandwidth: ClassVar[Mapping[int, int]] = MappingProxyType(
        {TURNED_ROWS: 60, STREAMED_ROWS: 43}
    )
    narrow_sm_bandwidth: ClassVar[Mapping[int, int]] = MappingProxyType(
        {TURNED_ROWS: 42, STREAMED_ROWS: 30}
    )
    remedy = "Use a tile such as TileConfig(16, 128, warps=4)."

    def has(self, tile: TileConfig) -> bool:
        return super().has(tile) and tile.rows in (TURNED_ROWS, STREAMED_ROWS)

    def obstacle(self, spec: AttentionSpec, tile: TileConfig) -> str | None:
        if tile.keys not in (16 * tile.warps, 32 * tile.warps):
            return f"each warp has 16 or 32 keys, and {tile.warps} are to share {tile.keys}"
        return stages_obstacle(tile)

    def threads(self, tile: TileConfig) -> int:
        """Threads of a CTA: the warps that compute, and one more."""
        return super().threads(tile) + 32

    def registers(self, spec: AttentionSpec, capability: tuple[int, int]) -> int:
        """Registers of a thread: fewer for small heads; merging holds several partial results."""
        if max(spec.head_dim_qk, spec.head_dim_v) > 128:
            return MOST_REGISTERS
        return 200 if spec.kv_format.composed else 168

    def launch_bounds(self, spec: AttentionSpec, tile: TileConfig) -> str:
        """Threads, and one CTA per SM: shared memory limits the CTAs, not registers."""
        return f"{self.threads(tile)}, 1"

    def candidates(self, spec: AttentionSpec, arch: Arch, work: Work) -> Iterator[TileConfig]:
        """Tiles to try: for two CTAs on an SM, so that one reads while the other ends an item.

        If no CTA has two items, one CTA per SM leaves fewer partial results to merge.
        """
        if work.rows > STREAMED_ROWS:
            return
        alone, paired = TileConfig(16, 128, 4, 2), TileConfig(16, 64, 2, 2)
        if spec.is_narrow:  # half the bytes, the same instructions: more warps
            yield TileConfig(16, 256, 8, 2)
        yield from (alone, paired) if work.has_few_items or spec.is_narrow else (paired, alone)
        yield TileConfig(16, 32, 2, 2)
        yield TileConfig(16, 16, 1, 2)

    def weighed(self, spec: AttentionSpec, arch: Arch) -> list[TileConfig]:
        return self.fitting(spec, arch, [TileConfig(16, 128, 4, 2), TileConfig(16, 64, 2, 2)])

    def kind(self, tile: TileConfig) -> str:
        return f"streamed by {tile.warps}"

    def is_known(self, tile: TileConfig, work: Work) -> bool:
        """False for one CTA per SM if SMs have several items: two CTAs decoded up to 5 % faster.

        The cost model ignores that a CTA which has an SM alone leaves it idle while an item ends.
        """
        alone = tile.warps == 4
        return super().is_known(tile, work) and not (alone and not work.has_few_items)

    def of_each_warp(self, tile: TileConfig) -> str:
        return "all warps share the rows and split the keys"

    def rule(self, work: Work) -> str:
        items = "no more" if work.has_few_items else "more"
        return f", for {items} pairs of a request and a head than SMs"


class StreamedInBoxes(Streamed):
    """Tiles of decodes beside a Hopper tile: its tensor maps copy whole small blocks."""

    def copies_boxes(self, spec: AttentionSpec, tile: TileConfig) -> bool:
        """True if any tile has whole blocks, and keys and values have 16 bits and no transform.

        Threads of a tile of 16 rows have no registers for the destinations of boxes: with tensor
        copies it took up to 1.3 times as long.
        """
        kv_format, hooks = spec.kv_format, spec.variant.hooks
        changes = "key_transform" in hooks or "value_transform" in hooks
        has_boxes = kv_format.block_kv in _BOXES and not kv_format.column_positions
        suits = tile.rows == TURNED_ROWS and has_boxes
        return suits and not changes and not spec.is_narrow
