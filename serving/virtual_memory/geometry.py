"""Where each number of a virtual cache lies: planes, records and strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from warploom.dsl.types.limits import MAX_LENGTH
from warploom.errors import ArgumentError

AXES = ("layer", "kv", "token", "head")

# Kernels may load whole tiles of keys, of which those behind the last token are masked. The widest
# tile has 128 keys, so that many tokens less one behind the last one must have memory.
_MOST_KEYS_OF_A_TILE = 128
_WHOLE_TILES = 384  # tokens that tiles of 64, 96 and 128 keys fill evenly
LONGEST = MAX_LENGTH // _WHOLE_TILES * _WHOLE_TILES  # tokens of a request


@dataclass(frozen=True)
class Geometry:
    """One request's addresses, and how they follow one another from request to request.

    What stands before "token" in `order` has addresses of its own, a *plane*, which grows with the
    tokens. What stands behind it is part of a token's *record*; records lie side by side in their
    plane, whether or not they fill pages evenly.

    Attributes:
        sizes: of the axes "layer", "kv" and "head", by name.
        head_dim: numbers in a vector, the last axis.
        item_bytes: of a number.
        order: the axes but the last, in the order in which they lie in memory.
        max_tokens: of a request.
        page_bytes: of a page of memory.
        page_size: tokens in a page of the page tables that kernels read; None if that is all that
            a request can have.
    """

    sizes: dict[str, int]
    head_dim: int
    item_bytes: int
    order: Sequence[str]
    max_tokens: int
    page_bytes: int
    page_size: int | None

    def __post_init__(self) -> None:
        """Raise ArgumentError for an order that does not name each axis once."""
        if isinstance(self.order, str) or sorted(self.order) != sorted(AXES):
            reason = f"is {self.order!r}; expected each of {', '.join(AXES)} once"
            raise ArgumentError(name="order", reason=reason)

    @cached_property
    def outer(self) -> Sequence[str]:
        """Axes of the planes."""
        return tuple(self.order)[: tuple(self.order).index("token")]

    @cached_property
    def inner(self) -> Sequence[str]:
        """Axes of a record."""
        return tuple(self.order)[tuple(self.order).index("token") + 1 :]

    @cached_property
    def planes(self) -> int:
        """Runs of addresses that a request has."""
        return math.prod(self.sizes[axis] for axis in self.outer)

    @cached_property
    def record_bytes(self) -> int:
        """Of a token in one plane."""
        return math.prod(self.sizes[axis] for axis in self.inner) * self.head_dim * self.item_bytes

    @cached_property
    def block(self) -> int:
        """Tokens in a page of page tables."""
        return self.page_size or -(-self.max_tokens // _WHOLE_TILES) * _WHOLE_TILES

    @cached_property
    def capacity(self) -> int:
        """Tokens that a request has addresses for: `max_tokens`, in whole pages of page tables."""
        return -(-self.max_tokens // self.block) * self.block

    @cached_property
    def max_rows(self) -> int:
        """Pages that a plane has addresses for."""
        return -(-self.capacity * self.record_bytes // self.page_bytes)

    @cached_property
    def plane_bytes(self) -> int:
        """From one plane to the next."""
        return self.max_rows * self.page_bytes

    @cached_property
    def block_bytes(self) -> int:
        """From one page of page tables to the next."""
        return self.slot_bytes if self.page_size is None else self.block * self.record_bytes

    @cached_property
    def slot_bytes(self) -> int:
        """From one request to the next; pages of page tables divide it."""
        size = self.planes * self.plane_bytes
        if self.page_size is None:
            return size
        unit = math.lcm(self.page_bytes, self.block * self.record_bytes)
        return -(-size // unit) * unit

    @cached_property
    def blocks_per_slot(self) -> int:
        """Numbers of pages in page tables from one request to the next."""
        return self.slot_bytes // self.block_bytes

    @cached_property
    def margin(self) -> int:
        """Tokens behind the last one that kernels may load."""
        return min(self.block, _MOST_KEYS_OF_A_TILE) - 1

    def rows(self, tokens: int) -> int:
        """Pages of each plane that so many tokens need."""
        if tokens == 0:
            return 0
        reached = min(tokens + self.margin, self.capacity)
        return -(-reached * self.record_bytes // self.page_bytes)

    def tokens(self, rows: int) -> int:
        """The most tokens that so many pages of each plane are enough for."""
        if rows >= self.max_rows:
            return self.max_tokens
        fit = rows * self.page_bytes // self.record_bytes - self.margin
        return max(0, min(fit, self.max_tokens))

    def stride(self, axis: str) -> int:
        """Bytes from one place to the next along "layer", "kv", "token" or "head"."""
        if axis == "token":
            return self.record_bytes
        axes, unit = (
            (self.outer, self.plane_bytes)
            if axis in self.outer
            else (self.inner, self.head_dim * self.item_bytes)
        )
        behind = axes[axes.index(axis) + 1 :]
        return unit * math.prod(self.sizes[other] for other in behind)

    def offset(self, slot: int, plane: int, row: int) -> int:
        """Bytes from the first address to a page."""
        return slot * self.slot_bytes + plane * self.plane_bytes + row * self.page_bytes
