"""Splits that do not depend on the batch: every tile is cut at multiples of one size.

A request's partial results, and the order in which they are merged, are then the same whatever else
is in the batch, on any number of CTAs. Chunks are never cut again, so they are assigned longest
first. With two roles each role has its own split size (`split_of`); see `role_chunks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from warploom.scheduler.model.layout import MERGE, Ints, Records
from warploom.scheduler.model.problem import Problem, WorkList, by_cta
from warploom.scheduler.model.roles import Role, roles_of, split_of
from warploom.scheduler.model.tiles import Tiles, query_tiles, span
from warploom.scheduler.partition.balance import assign
from warploom.scheduler.partition.ordering import assigning_order


@dataclass(frozen=True)
class ChunkCounts:
    """Most chunks, merges and slots that cutting at multiples of one size makes of a batch.

    From `Bounds` one must assume that all rows belong to the longest request; a batch at hand gives
    smaller counts, since it shows which rows meet which keys.

    Attributes:
        items: work items.
        merges: tiles of several chunks.
        slots: chunks of those tiles.
    """

    items: int
    merges: int
    slots: int

    @classmethod
    def of(
        cls,
        segments: Records,
        roles: Sequence[Role],
        group_size: int,
        num_kv_heads: int,
        split_size: int,
    ) -> ChunkCounts:
        """Counts for SEGMENT records, cut into the tiles of these roles."""
        shapes = np.array([(role.rows, split_of(split_size, role.keys)) for role in roles])
        rows, size = shapes[roles_of(segments, group_size, roles)].T
        tiles = -(-segments["num_q"].astype(np.int64) * group_size // rows) * num_kv_heads
        chunks = np.maximum(-(-segments["kv_count"].astype(np.int64) // size), 1)
        cut = chunks > 1
        slots = int((tiles * chunks)[cut].sum())
        return cls(slots + int(tiles[~cut].sum()), int(tiles[cut].sum()), slots)

    def within(self, other: ChunkCounts) -> ChunkCounts:
        """The smaller of each number."""
        pairs = ((self.items, other.items), (self.merges, other.merges), (self.slots, other.slots))
        return ChunkCounts(*(min(pair) for pair in pairs))


@dataclass(frozen=True)
class Chunks:
    """All chunks of a problem of one tile.

    Attributes:
        problem: what was cut.
        tiles: the chunks of one head, in order; other heads have the same.
        tile: (n,) index of each chunk's tile.
        cost: (n,) cost of each chunk.
    """

    problem: Problem
    tiles: Tiles
    tile: Ints
    cost: Ints

    @classmethod
    def of(cls, problem: Problem) -> Chunks:
        """Cuts all tiles of a problem that has a split size."""
        assert problem.split_size is not None
        size = split_of(problem.split_size, problem.keys)
        chunks, tile = fixed_chunks(query_tiles(problem), problem, size)
        return cls(problem, chunks, tile, problem.cost_model.of_chunks(chunks.visible))

    @property
    def count(self) -> int:
        """Chunks of all heads."""
        return len(self.cost) * self.problem.num_kv_heads

    @property
    def total(self) -> int:
        """Cost of the chunks of all heads."""
        return int(self.cost.sum()) * self.problem.num_kv_heads

    def items(self, ctas: int) -> tuple[Records, Records, Ints]:
        """Items of all heads in the order in which `ctas` CTAs take them, merges, and costs."""
        problem, mean = self.problem, -(-self.total // ctas)
        chunk, head = assigning_order(problem, self.cost, self.tiles.segment, mean)
        items = self.tiles.items(chunk, head)
        merges = number_slots(items, self.tile, chunk, head, problem.num_kv_heads)
        return items, merges, self.cost[chunk]


def build(problem: Problem) -> WorkList:
    """Plans one batch for one tile. `tests/support/plan_text.py` is the same, item by item."""
    items, merges, cost = Chunks.of(problem).items(problem.active_ctas)
    cta, _ = assign(cost, problem.active_ctas)
    return by_cta(items, merges, cta, cost, problem.num_ctas)


def fixed_chunks(tiles: Tiles, problem: Problem, size: int) -> tuple[Tiles, Ints]:
    """Cuts every tile at the multiples of `size`, whatever else is in the batch.

    Chunks without visible keys are left out, unless the whole tile sees nothing.

    Returns:
        The chunks in order, and the index of each chunk's tile.
    """
    first = tiles.kv_begin // size
    count = np.maximum(-(-tiles.kv_end // size) - first, 1)
    tile = np.repeat(np.arange(len(count)), count)
    place = (first - np.cumsum(count) + count)[tile] + np.arange(len(tile))
    chunks = tiles.take(tile)
    begin = np.maximum(place * size, chunks.kv_begin)
    end = np.minimum((place + 1) * size, chunks.kv_end)
    holes = chunks.visible < span(chunks, problem.keys)
    visible = -((begin - end) // problem.keys)
    empty = chunks.visible == 0
    chunks = Tiles(chunks.segment, chunks.row_begin, chunks.row_end, begin, end, visible)
    if holes.any():
        cut = chunks.take(np.flatnonzero(holes))
        visible[holes] = problem.visibility.visible_tiles(
            cut.segment, cut.row_begin, cut.row_end, cut.kv_begin, cut.kv_end, problem.keys
        )
    keep = np.flatnonzero((visible > 0) | empty)
    return chunks.take(keep), tile[keep]


def number_slots(items: Records, tile: Ints, chunk: Ints, head: Ints, num_heads: int) -> Records:
    """Gives slots and merges to the items of tiles with several chunks, tile after tile.

    Args:
        items: (n,) records, changed in place.
        tile: tile of each chunk, ascending.
        chunk, head: (n,) chunk and head of each item.
    """
    parts = np.bincount(tile)
    parts = np.where(parts > 1, parts, 0)
    if not parts.any():
        return np.zeros(0, MERGE.dtype)
    first_chunk = np.searchsorted(tile, np.arange(len(parts)))
    part = np.arange(len(tile)) - first_chunk[tile]
    base = (np.cumsum(parts) - parts) * num_heads
    rank = (np.cumsum(parts > 0) - 1) * num_heads
    split = np.flatnonzero(parts[tile[chunk]])
    owner, at = tile[chunk[split]], head[split]
    items["slot"][split] = base[owner] + at * parts[owner] + part[chunk[split]]
    items["merge"][split] = rank[owner] + at
    whole = np.flatnonzero(parts)
    merges = np.zeros((len(whole), num_heads), MERGE.dtype)
    merges["num_slots"] = parts[whole][:, None]
    merges["first_slot"] = base[whole][:, None] + parts[whole][:, None] * np.arange(num_heads)
    return merges.reshape(-1)
