"""Boxes: what one tensor copy of Hopper brings of keys or values.

A kernel's text and the maps that its launches make (`runtime.launching.tensor_map`) both take it
from here: a box of other bytes than the kernel waits for would let it wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat

_FEWEST_TOKENS = 8  # the rows after which swizzling repeats


@dataclass(frozen=True)
class Box:
    """The lanes that one swizzled row holds, of a few tokens of one head.

    Attributes:
        tokens: one behind the other in memory.
        row_bytes: of each.
    """

    tokens: int
    row_bytes: int


def box_of(kv_format: KVFormat, tile: TileConfig, dims: tuple[int, int]) -> Box | None:
    """The box of a tile's copies; None if blocks do not fill boxes evenly.

    Args:
        kv_format: how keys and values are stored.
        tile: of the prefills, or of all rows.
        dims: lanes of staged keys, and of values, padded.
    """
    block = kv_format.block_kv
    if block and (holds_small_blocks(block) or not suits_blocks(tile.keys, block)):
        return None
    return Box(min(tile.keys, block) if block else tile.keys, 2 * swizzled_lanes(dims))


def swizzled_lanes(dims: tuple[int, int]) -> int:
    """16-bit numbers of a swizzled row, for padded lanes of keys and of values."""
    return 64 if all(dim % 64 == 0 for dim in dims) else 32


def holds_small_blocks(block: int) -> bool:
    """Whether no box fits blocks of so many tokens, which are gathered token by token."""
    return block % _FEWEST_TOKENS != 0


def suits_blocks(keys: int, block: int) -> bool:
    """Whether a tile of so many keys has whole blocks or lies in one, if these come in boxes."""
    return block == 0 or holds_small_blocks(block) or keys % block == 0 or block % keys == 0
