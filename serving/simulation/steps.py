"""A step of serving: which rows of which requests the device computes together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from warploom.simulation_errors import BadSetup


@dataclass(frozen=True)
class Piece:
    """Rows of one request in a step: one that decodes, or a chunk of its prompt.

    Attributes:
        request: its number.
        rows: query rows.
        keys: that the last of them sees.
        emits: whether a token comes of it that was asked for.
    """

    request: int
    rows: int
    keys: int
    emits: bool = True

    @property
    def pairs(self) -> float:
        """Rows times the keys that each sees, under a causal mask."""
        return self.rows * (self.keys - (self.rows - 1) / 2)


@dataclass(frozen=True)
class Batch:
    """What one group computes in a step."""

    pieces: tuple[Piece, ...] = ()

    @cached_property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @cached_property
    def keys(self) -> int:
        """Keys that are read, all requests together."""
        return sum(piece.keys for piece in self.pieces)

    @cached_property
    def pairs(self) -> float:
        return sum(piece.pairs for piece in self.pieces)

    @cached_property
    def prefills(self) -> bool:
        """Whether prompts are among it, for which plans cost more."""
        return any(piece.rows > 1 for piece in self.pieces)


@dataclass(frozen=True)
class Step:
    """One step of an engine.

    Attributes:
        number: of it, from 0 on.
        batches: one for each group that computes in step with the others.
        moved: tokens whose keys change their group for it.
    """

    number: int
    batches: tuple[Batch, ...]
    moved: int = 0

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in self.batches)

    @property
    def requests(self) -> int:
        return sum(len(batch.pieces) for batch in self.batches)

    def micro(self, parts: int) -> list[Step]:
        """As micro-batches of equally many rows; those without a row are left out."""
        if parts < 1:
            raise BadSetup(name="micro_batches", got=parts, expected="at least 1")
        columns = zip(*(cut(batch, parts) for batch in self.batches), strict=True)
        # keys move once, before the first of them
        steps = [Step(self.number, c, 0 if i else self.moved) for i, c in enumerate(columns)]
        return [step for step in steps if step.rows]


def cut(batch: Batch, parts: int) -> list[Batch]:
    """A batch in parts of equally many rows, one at most more; chunks of prompts are cut, too.

    The part of a chunk with its last row emits; rows and pairs stay the same in all.
    """
    share, more = divmod(batch.rows, parts)
    sizes = [share + (i < more) for i in range(parts)]
    found: list[list[Piece]] = [[] for _ in sizes]
    at = 0
    for piece in batch.pieces:
        left = piece.rows
        while left:
            while not sizes[at]:
                at += 1
            taken = min(left, sizes[at])
            left -= taken
            sizes[at] -= taken
            found[at].append(
                Piece(piece.request, taken, piece.keys - left, piece.emits and not left)
            )
    return [Batch(tuple(pieces)) for pieces in found]


def spread(batches: Sequence[Batch]) -> int:
    """Keys by which the fullest group is ahead of the emptiest."""
    return max(b.keys for b in batches) - min(b.keys for b in batches)
