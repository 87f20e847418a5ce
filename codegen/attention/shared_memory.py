"""The layout of a CTA's dynamic shared memory: a table for each template.

Launches use its size, and kernels get the offsets as constants. Headers assert that the bytes of
each region equal the size of what they store there, so that a kernel which disagrees does not
compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from warploom.codegen.sizes import round_up
from warploom.codegen.source import TileConfig
from warploom.dsl.types.spec import AttentionSpec

TILE_ALIGN = 1024  # alignment of staged tiles, whose swizzles repeat after this many bytes
_FACTS_BYTES = 112  # ItemFacts
_ROW_BYTES = 12  # RowInfo
_PACKED_ROW_BYTES = 32  # PackedRow, of composed plans


@dataclass(frozen=True)
class Region:
    """Bytes that begin at a multiple of `align`."""

    name: str
    bytes: int
    align: int = 16


@dataclass(frozen=True)
class Overlay:
    """Regions `then` that reuse the memory of `first` when that has been read."""

    first: Sequence[Region]
    then: Sequence[Region]


Entry: TypeAlias = Region | Overlay


class SharedMemory:
    """A table of consecutive regions.

    Attributes:
        bytes: size of all regions together.
        places: offset of each region, by its name.
    """

    def __init__(self, *entries: Entry) -> None:
        self.places: dict[str, int] = {}
        self._regions: list[Region] = []
        self.bytes = self._place(entries, 0)

    def _place(self, entries: Sequence[Entry], begin: int) -> int:
        """Place entries from offset `begin` on; returns the end of the last one."""
        for entry in entries:
            if isinstance(entry, Overlay):
                begin = max(self._place(found, begin) for found in (entry.first, entry.then))
                continue
            self.places[entry.name] = round_up(begin, entry.align)
            self._regions.append(entry)
            begin = self.places[entry.name] + entry.bytes
        return begin

    def struct(self) -> str:
        """C++ constants: for region `keys`, the offset `kKeys` and the size `kKeysBytes`."""
        lines = [
            f"    static constexpr int {name} = {self.places[region.name]}, "
            f"{name}Bytes = {region.bytes};"
            for region in self._regions
            for name in ["k" + "".join(map(str.capitalize, region.name.split("_")))]
        ]
        total = f"    static constexpr int kBytes = {self.bytes};"
        return "\n".join(["  struct SharedMemory {", *lines, total, "  };"])


def padded_dims(spec: AttentionSpec) -> tuple[int, int]:
    """Lanes of staged queries and keys, and of staged values, padded to whole swizzled blocks."""
    return padded(spec.head_dim_qk, spec.head_dim_v)


def padded(dim_qk: int, dim_v: int) -> tuple[int, int]:
    """`padded_dims` for head dimensions."""
    return round_up(dim_qk, 32), round_up(dim_v, 32)


def items_region(spec: AttentionSpec, tile: TileConfig, count: int) -> Region:
    """The region for the rows of a tile and the facts of its item, for `count` items at a time."""
    row = _PACKED_ROW_BYTES if spec.kv_format.composed else _ROW_BYTES
    return Region("items", count * (round_up(row * tile.rows, 16) + _FACTS_BYTES))
