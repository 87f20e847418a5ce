"""Which tokens of a sequence each rank holds.

A layout says it three times, and always by the same formula: to the engine (`local_len`,
`positions`), to the kernel, which works a key's position out from its place on the rank
(`position`), and in the columns of numbers that the kernel needs for that (`columns`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from warploom.dsl.types.limits import MAX_LENGTH
from warploom.dsl.values.functions import clamp, where
from warploom.dsl.values.symbols import Value
from warploom.errors import ArgumentError

Ints: TypeAlias = np.ndarray[Any, Any]
Lengths: TypeAlias = "Sequence[int] | Ints"  # of sequences, in tokens


class Layout(ABC):
    """Tokens of each sequence over the ranks of a group.

    Args:
        world: ranks.

    Attributes:
        num_columns: numbers that a kernel needs for each request.
    """

    num_columns: int

    def __init__(self, world: int) -> None:
        self.world = checked_size("world", world)

    @abstractmethod
    def local_len(self, lengths: Any, rank: int) -> Any:
        """How many tokens of sequences of these lengths a rank holds.

        Args:
            lengths: an int, an array of ints, or a torch tensor of them on any device.
            rank: from 0 within the group.
        """

    @abstractmethod
    def positions(self, length: int, rank: int) -> Ints:
        """Positions of a rank's tokens in the sequence: int64 [local_len], ascending."""

    @abstractmethod
    def columns(self, lengths: Any, rank: int) -> list[Any]:
        """`num_columns` arrays or tensors like `lengths`, which `position` reads."""

    @abstractmethod
    def position(self, place: Value, column: Callable[[int], Value]) -> Value:
        """Position in the sequence of a rank's token.

        Args:
            place: the token's number on the rank.
            column: gives one of the request's `columns`.
        """

    def indices(self, lengths: Lengths, rank: int) -> Ints:
        """Rows of a rank in tensors that hold all tokens, one sequence behind the other: int64."""
        begins = np.cumsum([0, *lengths])
        parts = [at + self.positions(int(n), rank) for at, n in zip(begins, lengths, strict=False)]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def order(self, lengths: Lengths) -> Ints:
        """`indices` of all ranks, one rank behind the other: a permutation of all tokens."""
        return np.concatenate([self.indices(lengths, rank) for rank in range(self.world)])


class Interleaved(Layout):
    """Block i of a sequence lies on rank i % world, as engines store keys for decoding.

    A new token goes to one rank, and all ranks grow alike. Each holds its blocks one behind the
    other, so that its cache is as any other: dense, ragged, paged, rolling.

    Args:
        world: ranks.
        block: tokens of a block.
    """

    num_columns = 1

    def __init__(self, world: int, block: int = 1) -> None:
        super().__init__(world)
        self.block = checked_size("block", block)

    def __repr__(self) -> str:
        return f"Interleaved({self.world}, block={self.block})"

    def owner(self, position: Any) -> Any:
        """Rank of the token at a position; of ints, arrays and torch tensors."""
        return position // self.block % self.world

    def place(self, position: Any) -> Any:
        """The token's number on its rank."""
        return position // (self.block * self.world) * self.block + position % self.block

    def local_len(self, lengths: Any, rank: int) -> Any:
        lengths = _arithmetic(lengths)
        row = self.block * self.world
        rest = (lengths % row - rank * self.block).clip(0, self.block)
        return lengths // row * self.block + rest

    def positions(self, length: int, rank: int) -> Ints:
        place = np.arange(int(self.local_len(length, rank)))
        return (place // self.block * self.world + rank) * self.block + place % self.block

    def columns(self, lengths: Any, rank: int) -> list[Any]:
        return [_arithmetic(lengths) * 0 + rank]

    def position(self, place: Value, column: Callable[[int], Value]) -> Value:
        # The clamp says that nothing overflows, so that positions grow evenly from key to key.
        first = clamp(column(0), 0, self.world - 1) * self.block
        if self.block == 1:
            return place * self.world + first
        return place // self.block * (self.block * self.world) + first + place % self.block


class ZigZag(Layout):
    """2 x world chunks in order; rank r holds chunk r and, from the end, chunk r again.

    Under a causal mask all ranks then have the same work in prefill (the order of Llama 3's context
    parallelism; zig-zag in Ring Attention's successors). Chunks differ by one token at most.

    Args:
        world: ranks.
    """

    num_columns = 3

    def __repr__(self) -> str:
        return f"ZigZag({self.world})"

    def _pieces(self, lengths: Any, rank: int) -> tuple[Any, Any, Any, Any]:
        """Begin and end of the first chunk and of the second."""
        lengths, chunks = _arithmetic(lengths), 2 * self.world
        ends = (rank, rank + 1, chunks - 1 - rank, chunks - rank)
        first, first_end, second, second_end = (lengths * end // chunks for end in ends)
        return first, first_end, second, second_end

    def local_len(self, lengths: Any, rank: int) -> Any:
        first, first_end, second, second_end = self._pieces(lengths, rank)
        return first_end - first + second_end - second

    def positions(self, length: int, rank: int) -> Ints:
        first, first_end, second, second_end = self._pieces(length, rank)
        return np.concatenate([np.arange(first, first_end), np.arange(second, second_end)])

    def columns(self, lengths: Any, rank: int) -> list[Any]:
        first, first_end, second, _ = self._pieces(lengths, rank)
        return [first_end - first, first, second]

    def position(self, place: Value, column: Callable[[int], Value]) -> Value:
        split, first, second = (clamp(column(i), 0, MAX_LENGTH) for i in range(3))
        return where(place < split, first + place, second - split + place)


def zigzag_order(length: int, world: int) -> Ints:
    """The order in which zig-zag ranks hold one sequence: int64 [length], rank behind rank."""
    return ZigZag(world).order([length])


def checked_size(name: str, value: Any) -> int:
    """A whole number from 1; raises ArgumentError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(name=name, reason=f"is {value!r}; expected a whole number from 1")
    return value


def _arithmetic(lengths: Any) -> Any:
    """What adds, divides and clips element by element, in 64 bits."""
    if hasattr(lengths, "detach"):
        return lengths.long()
    return np.asarray(lengths, np.int64)
