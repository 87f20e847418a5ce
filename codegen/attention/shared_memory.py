"""Bytes of what CUDA kernels keep of a work item; the headers assert the same sizes."""

from __future__ import annotations

from warploom.codegen.sizes import round_up
from warploom.codegen.source import TileConfig
from warploom.dsl.formats import KVFormat

FACTS_BYTES = 112  # ItemFacts
ROW_BYTES = 12  # RowInfo
PACKED_ROW_BYTES = 32  # PackedRow, of composed plans


def staged_item_bytes(kv_format: KVFormat, tile: TileConfig) -> int:
    """Shared memory that holds the rows of a tile and the facts of its item."""
    row = PACKED_ROW_BYTES if kv_format.composed else ROW_BYTES
    return round_up(row * tile.rows, 16) + FACTS_BYTES
