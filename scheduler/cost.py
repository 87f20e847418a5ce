"""The cost of a chunk: Algorithm 1's alpha * rows + beta * keys, in small integers."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from warploom.scheduler.layout import Ints

ALPHA = 1  # per query row of an item: loading queries, writing output
BETA = 1  # per visible key: both products and the softmax
SHORTEST_CHUNK = 128  # keys; below this a partial result costs more to merge than it saves


@dataclass(frozen=True)
class CostModel:
    """Costs of one tile shape (FlashInfer, Algorithm 1 line 2).

    An item costs `fixed + per_tile * (visible key tiles)`. Integers keep loads exact, so that both
    planners agree on every tie.

    Attributes:
        fixed: cost of an item without keys.
        per_tile: cost of one key tile.
        grain: key tiles of the shortest chunk that is ever cut off.
    """

    fixed: int
    per_tile: int
    grain: int

    @classmethod
    def of(cls, rows: int, keys: int) -> CostModel:
        unit = gcd(ALPHA * rows, BETA * keys)
        # A chunk should be worth at least twice its fixed cost.
        shortest = max(SHORTEST_CHUNK, 2 * ALPHA * rows // BETA)
        return cls(ALPHA * rows // unit, BETA * keys // unit, -(-shortest // keys))

    def of_chunks(self, visible: Ints) -> Ints:
        """Costs of chunks with these numbers of visible key tiles."""
        return self.fixed + self.per_tile * visible
