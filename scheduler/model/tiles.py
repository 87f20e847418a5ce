"""Query tiles of a batch: fused rows cut into tiles, each with the keys that it may see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from warploom.scheduler.model.layout import WORK_ITEM, Ints, Records
from warploom.scheduler.model.problem import Problem
from warploom.scheduler.model.visibility import Visibility


@dataclass(frozen=True)
class Tiles:
    """Tiles of all segments, shape (n,) each; every key/value head has the same ones.

    Ordered by segment, then from the last rows to the first: under a causal mask the long
    tiles of a segment come first.

    Attributes:
        kv_begin: first key, a multiple of the key tile.
        kv_end: one past the last key; equal to kv_begin if nothing is visible.
        visible: key tiles that are not skipped.
    """

    segment: Ints
    row_begin: Ints
    row_end: Ints
    kv_begin: Ints
    kv_end: Ints
    visible: Ints

    def take(self, index: Ints) -> Tiles:
        return Tiles(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def items(self, index: Ints, head: Ints) -> Records:
        """WORK_ITEM records, without slots, of pairs of a tile and a head; shape (n,) each."""
        items = np.zeros(len(self.segment), WORK_ITEM.dtype)
        for field in ("segment", "row_begin", "kv_begin", "kv_end"):
            items[field] = getattr(self, field)
        items["slot"] = items["merge"] = -1
        items = items.take(index)
        items["kv_head"] = head
        return items


def query_tiles(problem: Problem) -> Tiles:
    """Cuts each segment's fused rows (FlashInfer, appendix A) and asks the mask about each tile."""
    segments = problem.segments
    fused = segments["num_q"].astype(np.int64) * problem.group_size
    only = np.arange(len(segments)) if problem.only is None else problem.only
    rows, keys = problem.rows, problem.keys
    count = -(-fused[only] // rows)
    segment = np.repeat(only, count)
    row_begin = (np.repeat(np.cumsum(count), count) - 1 - np.arange(len(segment))) * rows
    row_end = np.minimum(row_begin + rows, fused[segment])
    where = segment, row_begin, row_end
    begin, end = key_bounds(problem.visibility, segments, where, keys)
    visible = problem.visibility.visible_tiles(segment, row_begin, row_end, begin, end, keys)
    seen = visible > 0
    return Tiles(segment, row_begin, row_end, begin * seen, end * seen, visible)


def key_bounds(
    visibility: Visibility, segments: Records, where: tuple[Ints, Ints, Ints], keys: int
) -> tuple[Ints, Ints]:
    """Keys [begin, end) that query tiles may see; begin is a multiple of `keys`; else [0, 0).

    Args:
        visibility: the mask's answers.
        segments: SEGMENT records.
        where: segment, row_begin and row_end of each tile, as `Visibility.kv_bounds` takes them.
        keys: keys of a key tile.
    """
    begin, end = visibility.kv_bounds(*where)
    begin = np.maximum(begin, 0)
    end = np.minimum(end, segments["kv_count"][where[0]])
    seen = end > begin
    return np.where(seen, begin - begin % keys, 0), np.where(seen, end, 0)


def span(tiles: Tiles, keys: int) -> Ints:
    """Key tiles of this size between the bounds, skipped ones included."""
    return -((tiles.kv_begin - tiles.kv_end) // keys)


def key_after(tiles: Tiles, visible: Ints, problem: Problem) -> Ints:
    """The key before which a tile has `visible` visible key tiles.

    Args:
        tiles: (n,) tiles.
        visible: (n,) counts, at least 1 and below the tile's own.

    Returns:
        (n,) indices into the list, multiples of the key tile.
    """
    keys = problem.keys
    place = tiles.kv_begin + visible * keys
    holes = np.flatnonzero(tiles.visible < span(tiles, keys))
    if len(holes):
        place[holes] = _bisect(tiles.take(holes), visible[holes], keys, problem.visibility)
    return place


def _bisect(tiles: Tiles, visible: Ints, keys: int, visibility: Visibility) -> Ints:
    """Smallest index with `visible` tiles before it; each step counts half of the open range."""
    low, high = tiles.kv_begin, tiles.kv_begin + span(tiles, keys) * keys
    before_low = np.zeros_like(visible)  # visible tiles before low: fewer than wanted
    while np.any(high - low > keys):
        middle = low + (high - low) // (2 * keys) * keys
        count = before_low + visibility.visible_tiles(
            tiles.segment,
            tiles.row_begin,
            tiles.row_end,
            low,
            np.minimum(middle, tiles.kv_end),
            keys,
        )
        enough = count >= visible
        high = np.where(enough, middle, high)
        low, before_low = np.where(enough, low, middle), np.where(enough, before_low, count)
    return high
