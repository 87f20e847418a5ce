"""The cost of a chunk: Algorithm 1's alpha * rows + beta * keys, in small integers."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from warploom.scheduler.model.layout import Ints

ALPHA = 1  # per query row of an item: loading queries, writing output
BETA = 1  # per visible key: both products and the softmax
SHORTEST_CHUNK = 128  # keys; below this a partial result costs more to merge than it saves
# Cost of a piece, in keys, for tiles that are cut after they are assigned, on a GPU: what a CTA
# could compute while it opens the piece, writes its partial result and merges. On an H100 a CTA
# with 28 pieces of 128 rows took 7 us more for each piece, and 1.7 us for 128 keys.
PIECE = 384
# Costs of the Stream-K partition, in keys; fitted to decoding on an H200. A CTA could read OPENING
# keys while it begins and ends an item, PARTIAL while it writes and merges a partial result.
OPENING = 128
PARTIAL = 128


@dataclass(frozen=True)
class CostModel:
    """Costs of one tile shape (FlashInfer, Algorithm 1 line 2).

    An item costs `fixed + per_tile * (visible key tiles)`. Integers keep loads exact, so that all
    planners agree on every tie.

    Attributes:
        fixed: cost of an item without keys.
        per_tile: cost of one key tile.
        grain: key tiles of the shortest chunk that is ever cut off.
        partial: cost of a partial result; 0 where the model ignores it.
    """

    fixed: int
    per_tile: int
    grain: int
    partial: int = 0

    @classmethod
    def of(cls, rows: int, keys: int, piece: int = 0) -> CostModel:
        """For assigning longest first.

        Args:
            rows, keys: size of a tile.
            piece: extra cost of a partial result, in keys.
        """
        unit = gcd(ALPHA * rows, BETA * keys)
        # A chunk should be worth at least twice its fixed cost.
        shortest = max(SHORTEST_CHUNK, 2 * ALPHA * rows // BETA)
        partial = -(-BETA * piece // unit)
        return cls(ALPHA * rows // unit, BETA * keys // unit, -(-shortest // keys), partial)

    @classmethod
    def for_stream_k(cls, rows: int, keys: int) -> CostModel:
        """For the Stream-K partition, whose pieces are shorter where whole items are not enough."""
        fixed = ALPHA * rows + BETA * OPENING
        unit = gcd(fixed, BETA * keys, BETA * PARTIAL)
        grain = -(-cls.of(rows, keys).grain // 2)
        return cls(fixed // unit, BETA * keys // unit, grain, BETA * PARTIAL // unit)

    @property
    def least_slice(self) -> int:
        """Least mean load of a Stream-K partition: each end of a slice may move by half a grain."""
        return 2 * self.per_tile * self.grain

    def of_longest(self, max_kv_len: int, keys: int) -> int:
        """Most that an item of a request of `max_kv_len` keys can cost, in key tiles of `keys`."""
        return self.fixed + self.per_tile * -(-max_kv_len // keys)

    def of_chunks(self, visible: Ints) -> Ints:
        """Costs of chunks with these numbers of visible key tiles."""
        return self.fixed + self.per_tile * visible
