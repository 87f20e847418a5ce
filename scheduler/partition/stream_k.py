"""The Stream-K partition: items end to end on lines, cut at multiples of the mean load.

It uses prefix sums and searches only, so that a device can plan as well as a host: the native
planner (`templates/common/warploom/planner/`) is the same algorithm and gives the same bits.
This is Stream-K's division of work with four changes. Each key/value head has its own line, and all
lines are cut at the same places: CTAs that run at the same time then read all heads of the same
tokens, which lie side by side in memory. Long and short tiles alternate on the line, so that whole
items often balance. A cut moves to the end of an item if that is near. Fewer CTAs are used if that
saves pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from warploom.scheduler.model.constants import FEW, PER_IDLE_CTA, SNAP
from warploom.scheduler.model.cost import CostModel
from warploom.scheduler.model.layout import MERGE, WORK_ITEM, Ints, Records
from warploom.scheduler.model.problem import Problem, WorkList, by_cta
from warploom.scheduler.model.tiles import Tiles, key_after, query_tiles
from warploom.scheduler.partition.pieces import Pieces


@dataclass(frozen=True)
class Grid:
    """How CTAs share lines; CTA `slice * lines + line` has one slice of one line.

    Attributes:
        lines: equal lines; one for each key/value head, or a single one for all.
        heads: key/value heads of a line.
        slices: slices of a line. A slice lies between two boundaries; it is the work of a CTA, or a
            shared list that CTAs claim.
    """

    lines: int
    heads: int
    slices: int

    @classmethod
    def of(cls, num_ctas: int, num_heads: int) -> Grid:
        if num_ctas % num_heads * PER_IDLE_CTA <= num_ctas and num_heads <= num_ctas:
            return cls(num_heads, 1, num_ctas // num_heads)
        return cls(1, num_heads, num_ctas)


@dataclass(frozen=True)
class Line:
    """Items of one line; shape (n,) each.

    Attributes:
        tile, head: of each item.
        begin: where the item begins on the line, in units of cost.
        cost: its length.
        visible: its visible key tiles.
        total: length of the line.
        model: cost model of the items.
    """

    tile: Ints
    head: Ints
    begin: Ints
    cost: Ints
    visible: Ints
    total: int
    model: CostModel

    @classmethod
    def of(cls, tiles: Tiles, heads: int, model: CostModel, by_tile: bool = False) -> Line:
        """Head after head with all tiles; or if `by_tile`, tile after tile with all heads."""
        order = _order(tiles)
        count = len(order) * heads
        if by_tile:
            tile, head = np.repeat(order, heads), np.arange(count) % heads
        else:
            tile, head = np.tile(order, heads), np.arange(count) // len(order)
        visible = tiles.visible[tile]
        cost = model.of_chunks(visible)
        end = np.cumsum(cost)
        return cls(tile, head, end - cost, cost, visible, int(cost.sum()), model)


def _order(tiles: Tiles) -> Ints:
    """Longest tile, shortest, second longest, ...; unless a segment has several tiles."""
    count = len(tiles.segment)
    if count > 1 and (tiles.segment[1:] == tiles.segment[:-1]).any():
        return np.arange(count)
    falling = np.argsort(-tiles.visible, kind="stable")
    order = np.empty(count, np.int64)
    order[0::2] = falling[: (count + 1) // 2]
    order[1::2] = falling[::-1][: count // 2]
    return order


@dataclass(frozen=True)
class Boundaries:
    """Where each slice of a line begins, and where the last one ends; shape (slices + 1,).

    Attributes:
        item: index on the line of the item at the boundary.
        visible: its visible key tiles before the boundary; 0: the boundary is the item's begin.
    """

    item: Ints
    visible: Ints


def build(problem: Problem) -> WorkList:
    """Plans one batch. `tests/support/plan_text_stream_k.py` is the same, item by item."""
    found = partition(query_tiles(problem), problem, problem.active_ctas)
    return by_cta(found.items, found.merges, found.owner, found.cost, problem.num_ctas)


def partition(tiles: Tiles, problem: Problem, ctas: int) -> Pieces:
    """Partitions these tiles, for all heads, among `ctas` CTAs."""
    if len(tiles.segment) == 0:
        return Pieces.none()
    grid = Grid.of(ctas, problem.num_kv_heads)
    line = Line.of(tiles, grid.heads, problem.cost_model)
    return cut(_best(line, grid.slices), line, grid, tiles, problem)


def _best(line: Line, slices: int) -> Boundaries:
    """Of four candidates, the boundaries whose largest load is the least."""
    count = len(line.tile)
    slices = max(1, min(slices, line.total // line.model.least_slice))
    fitting = fitting_slices(count, slices)
    best, least = None, 0
    for is_cut in (False, True):
        for used in (fitting, slices):
            found = _boundaries(line, used, is_cut)
            load = int(_loads(line, found).max())
            if best is None or load < least:
                best, least = found, load
    assert best is not None
    return best


def fitting_slices(items: int, slices: int) -> int:
    """`slices` or fewer, so that slices have equally many items, or items equally many slices.

    With more than FEW items a slice, uneven slices are even enough, and idle CTAs would cost more.
    """
    if items <= slices:
        return slices // items * items
    each = -(-items // slices)
    return items // each if each <= FEW else slices


def _boundaries(line: Line, slices: int, is_cut: bool) -> Boundaries:
    """Even boundaries, each moved to an end of its item; if `is_cut`, only to a near end."""
    at = np.arange(slices + 1) * line.total // slices
    return boundaries_at(at, line.total // (slices * SNAP) if is_cut else line.total, line)


def boundaries_at(at: Ints, snap: int, line: Line) -> Boundaries:
    """Boundaries at these ascending places, each moved to a whole key tile.

    A boundary moves to the nearer end of its item if that is within `snap`. No piece becomes
    shorter than a grain.
    """
    item = np.searchsorted(line.begin, at, side="right") - 1
    into = at - line.begin[item]
    cost, visible, model = line.cost[item], line.visible[item], line.model
    grain = model.grain
    whole = np.where(2 * into < cost, item, item + 1)
    near = np.minimum(into, cost - into) <= snap
    done = (2 * np.maximum(into - model.fixed, 0) + model.per_tile) // (2 * model.per_tile)
    kept = np.clip(done, grain, np.maximum(visible - grain, 0))
    kept = np.where(done * 2 < grain, 0, kept)
    to_end = (visible - done) * 2 < grain
    short = visible < 2 * grain
    moved = near | short | (kept == 0) | to_end
    end = np.where(near | short, whole, item + to_end)
    return Boundaries(np.where(moved, end, item), np.where(moved, 0, kept))


def _loads(line: Line, bounds: Boundaries) -> Ints:
    """Load of each CTA, its partial results included."""
    item, visible, model = bounds.item, bounds.visible, line.model
    inside = np.where(visible > 0, model.fixed + model.per_tile * visible, 0)
    place = np.append(line.begin, line.total)[item] + inside
    cut = visible > 0
    pieces = cut[1:] * 1 + cut[:-1] - ((item[1:] == item[:-1]) & cut[:-1])
    loads: Ints = np.diff(place) + cut[:-1] * model.fixed + pieces * model.partial
    return loads


def cut(bounds: Boundaries, line: Line, grid: Grid, tiles: Tiles, problem: Problem) -> Pieces:
    """Items and pieces between the boundaries; slots are numbered along the lines."""
    width = int(line.visible.max()) + 1
    code = bounds.item * width + bounds.visible
    cuts = np.unique(code[bounds.visible > 0])
    begin = np.sort(np.concatenate((np.arange(len(line.tile)) * width, cuts)))
    item, first = begin // width, begin % width
    closes = np.append(item[1:] != item[:-1], True)
    end = np.where(closes, line.visible[item], np.append(first[1:], 0))
    records = np.zeros(len(item), WORK_ITEM.dtype)
    for field in ("segment", "row_begin", "kv_begin", "kv_end"):
        records[field] = getattr(tiles, field)[line.tile[item]]
    records["kv_head"] = line.head[item]
    _cut_keys(records, tiles.take(line.tile[item]), first, problem)
    merges = _number(records, (first > 0) | ~closes, first == 0)
    of_slice = np.searchsorted(code[:-1], begin, side="right") - 1
    cost = line.model.of_chunks(end - first)
    lines = np.arange(grid.lines)[:, None]
    records, merges = _repeat(records, merges, grid.lines)
    owner = (of_slice * grid.lines + lines).reshape(-1)
    return Pieces(records, merges, owner, np.tile(cost, grid.lines))


def _cut_keys(records: Records, tiles: Tiles, first: Ints, problem: Problem) -> None:
    """Writes the key at which each piece begins and the piece before it ends."""
    begins = np.flatnonzero(first > 0)
    place = key_after(tiles.take(begins), first[begins], problem)
    records["kv_begin"][begins] = place
    records["kv_end"][begins - 1] = place


def _number(records: Records, partial: np.ndarray, begins: np.ndarray) -> Records:
    """Numbers the slots and merges of the pieces of one line."""
    opens = partial & begins
    records["slot"] = np.where(partial, np.cumsum(partial) - 1, -1)
    records["merge"] = np.where(partial, np.cumsum(opens) - 1, -1)
    merges = np.zeros(int(opens.sum()), MERGE.dtype)
    merges["first_slot"] = records["slot"][opens]
    merges["num_slots"] = np.bincount(records["merge"][partial], minlength=len(merges))
    return merges


def _repeat(records: Records, merges: Records, lines: int) -> tuple[Records, Records]:
    """Copies the work of one line to all lines, with heads, slots and merges shifted."""
    slots = int(merges["num_slots"].sum())
    all_records, all_merges = np.tile(records, (lines, 1)), np.tile(merges, (lines, 1))
    line = np.arange(lines)[:, None]
    partial = all_records["slot"] >= 0
    all_records["kv_head"] += line.astype(np.int32)
    all_records["slot"] += (partial * line * slots).astype(np.int32)
    all_records["merge"] += (partial * line * len(merges)).astype(np.int32)
    all_merges["first_slot"] += (line * slots).astype(np.int32)
    return all_records.reshape(-1), all_merges.reshape(-1)
