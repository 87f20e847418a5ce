"""Boxes: the part of keys or values that one tensor copy (TMA) of Hopper brings.

A kernel's source and the tensor maps of its launches (`runtime.launching.tensor_map`) both take the
box from here: if a box had other bytes than the kernel waits for, the kernel would wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat

_FEWEST_TOKENS = 8  # the rows after which swizzling repeats


@dataclass(frozen=True)
class Box:
    """The lanes of one swizzled row, for several tokens of one head.

    Attributes:
        tokens: number of tokens, whose rows are consecutive in memory.
        row_bytes: bytes of each row.
    """

    tokens: int
    row_bytes: int


def box_of(kv_format: KVFormat, tile: TileConfig, dims: tuple[int, int]) -> Box | None:
    """The box of a tile's copies; None if blocks have too few tokens for one.

    A box lies in one block, and boxes fill a tile. So pages of 80 tokens under a tile of 128 keys
    come in boxes of 16.

    Args:
        kv_format: how keys and values are stored.
        tile: the tile of prefills, or of all rows.
        dims: padded lanes of staged keys, and of staged values.
    """
    block = kv_format.block_kv
    if holds_small_blocks(block):
        return None
    return Box(gcd(tile.keys, block), 2 * swizzled_lanes(dims))  # gcd(keys, 0) = keys


def swizzled_lanes(dims: tuple[int, int]) -> int:
    """16-bit numbers per swizzled row, for the padded lanes of keys and of values."""
    return 64 if all(dim % 64 == 0 for dim in dims) else 32


def holds_small_blocks(block: int) -> bool:
    """Whether blocks of `block` tokens fit no box, so that they are gathered token by token."""
    return block % _FEWEST_TOKENS != 0


def suits_blocks(keys: int, block: int) -> bool:
    """Whether boxes are as large as can be: a tile has whole blocks, or lies in one block.

    Also true for blocks that boxes do not copy.
    """
    return block == 0 or holds_small_blocks(block) or gcd(keys, block) in (keys, block)
