"""The planner as text: Algorithm 1 and the levelling of loads in plain Python, one item at a time.

Slow, and the definition of what `worklist.build` computes: tests hold the two equal bit for bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from warploom.scheduler.model.constants import TOLERANCE, WORTH_CUTTING
from warploom.scheduler.model.layout import MERGE, WORK_ITEM, Ints
from warploom.scheduler.model.problem import Problem, WorkList, sections
from warploom.scheduler.partition.balance import limits_worth_cutting


@dataclass
class Item:
    """A work item. `visible` counts its key tiles that are not skipped."""

    segment: int
    kv_head: int
    row_begin: int
    row_end: int
    kv_begin: int
    kv_end: int
    visible: int
    slot: int = -1
    merge: int = -1


def build(problem: Problem) -> WorkList:
    """Plans one batch: see `lists`."""
    return work_list(problem, *lists(problem))


def lists(problem: Problem) -> tuple[list[list[Item]], list[tuple[int, int]]]:
    """Items of each CTA, and merges.

    1. Cut the fused rows of every segment in tiles and ask the mask for each tile's keys.
    2. With a fixed split size, cut the keys at its multiples, rounded up to key tiles.
    3. Assign the items, section by section, the longest first, each to the CTA with the least load.
    4. Without a fixed size: cut what lies above the mean load off each CTA's last item and give it
       to CTAs below.
    """
    tiles = [_fixed_chunks(problem, tile) for tile in query_tiles(problem)]
    items = [item for chunks in tiles for item in chunks]
    merges = _number_slots(tiles)
    total = sum(cost_of(problem, item) for item in items)
    mean = -(-total // problem.active_ctas)
    grade = max(1, mean // TOLERANCE)

    def rank(item: Item) -> tuple[int, ...]:
        section = int(sections(problem, _one(item.segment), _one(item.kv_head))[0])
        longest_first = -(cost_of(problem, item) // grade)
        return section, longest_first, item.segment, item.kv_head, -item.row_begin, item.kv_begin

    work: list[list[Item]] = [[] for _ in range(problem.num_ctas)]
    queue = [(0, cta) for cta in range(problem.active_ctas)]
    for item in sorted(items, key=rank):
        load, cta = heapq.heappop(queue)
        work[cta].append(item)
        heapq.heappush(queue, (load + cost_of(problem, item), cta))
    if problem.split_size is None:
        merges = _level(problem, work, sorted(queue), mean)
    return work, merges


def cost_of(problem: Problem, item: Item) -> int:
    return problem.cost_model.fixed + problem.cost_model.per_tile * item.visible


def query_tiles(problem: Problem) -> Iterator[Item]:
    for index, segment in enumerate(problem.segments):
        if problem.only is not None and index not in problem.only:
            continue
        fused = int(segment["num_q"]) * problem.group_size
        for head in range(problem.num_kv_heads):
            for row in range(0, fused, problem.rows):
                row_end = min(row + problem.rows, fused)
                begin, end = problem.visibility.kv_bounds(_one(index), _one(row), _one(row_end))
                first, last = max(int(begin[0]), 0), min(int(end[0]), int(segment["kv_count"]))
                first = first // problem.keys * problem.keys if first < last else 0
                tile = Item(index, head, row, row_end, first, max(first, last), 0)
                tile.visible = _visible(problem, tile, tile.kv_begin, tile.kv_end)
                yield tile if tile.visible else replace(tile, kv_begin=0, kv_end=0)


def _one(value: int) -> Ints:
    return np.array([value], dtype=np.int64)


def _visible(problem: Problem, item: Item, begin: int, end: int) -> int:
    count = problem.visibility.visible_tiles(
        _one(item.segment),
        _one(item.row_begin),
        _one(item.row_end),
        _one(begin),
        _one(end),
        problem.keys,
    )
    return int(count[0])


def _fixed_chunks(problem: Problem, tile: Item) -> list[Item]:
    """Cuts a tile at the multiples of the split size; drops chunks in which nothing is visible."""
    if problem.split_size is None or tile.visible == 0:
        return [tile]
    size = ceil(problem.split_size / problem.keys) * problem.keys
    chunks = []
    for start in range(tile.kv_begin // size * size, tile.kv_end, size):
        begin, end = max(start, tile.kv_begin), min(start + size, tile.kv_end)
        visible = _visible(problem, tile, begin, end)
        if visible:
            chunks.append(replace(tile, kv_begin=begin, kv_end=end, visible=visible))
    return chunks


def _number_slots(tiles: list[list[Item]]) -> list[tuple[int, int]]:
    """Gives consecutive slots to the chunks of each tile that has several."""
    merges: list[tuple[int, int]] = []
    slot = 0
    ordered = sorted(tiles, key=lambda chunks: (chunks[0].segment, -chunks[0].row_begin))
    for chunks in ordered:  # heads stay in order: the sort is stable
        if len(chunks) > 1:
            for part, item in enumerate(chunks):
                item.slot, item.merge = slot + part, len(merges)
            merges.append((slot, len(chunks)))
            slot += len(chunks)
    return merges


def _level(
    problem: Problem, work: list[list[Item]], queue: list[tuple[int, int]], mean: int
) -> list[tuple[int, int]]:
    """Cuts the last items of CTAs above the limit for CTAs below; see `balance.level`."""
    if queue[-1][0] <= mean + mean // WORTH_CUTTING:
        return []
    found = _limit(problem, work, queue, mean)
    if found is None:
        return []
    given, room = found
    rooms = [[grains, cta] for grains, (_, cta) in zip(room, queue, strict=True) if grains]
    merges: list[tuple[int, int]] = []
    slot = 0
    for grains, (_, cta) in zip(given, queue, strict=True):
        if grains:
            if merges:
                _take(rooms, _opening(problem))
            parts = _parts(work[cta].pop(), cta, grains, rooms, problem)
            for part, (taker, item) in enumerate(parts):
                work[taker].append(replace(item, slot=slot + part, merge=len(merges)))
            merges.append((slot, len(parts)))
            slot += len(parts)
    return merges


def _limit(
    problem: Problem, work: list[list[Item]], queue: list[tuple[int, int]], mean: int
) -> tuple[list[int], list[int]] | None:
    """Grains that each CTA gives, and has room for, at the lowest limit where the rooms suffice."""
    model = problem.cost_model
    grain = model.per_tile * model.grain
    gifts = []
    for _, cta in queue:
        most = work[cta][-1].visible // model.grain - 1 if work[cta] else 0
        gifts.append(most if most * grain > model.partial else 0)
    kept = max(
        load + model.partial - most * grain if most > 0 else load
        for (load, _), most in zip(queue, gifts, strict=True)
    )
    for limit in limits_worth_cutting(mean, kept, queue[-1][0]):
        given, room = [], []
        for (load, _), most in zip(queue, gifts, strict=True):
            given.append(max(0, min(-((limit - model.partial - load) // grain), most)))
            if load <= limit:
                given[-1] = 0
            room.append(max(0, (limit - model.fixed - model.partial - load) // grain))
        owners = sum(grains > 0 for grains in given)
        if sum(given) + _opening(problem) * (owners - 1) <= sum(room):
            return given, room
    return None


def _opening(problem: Problem) -> int:
    """Grains of room that a piece takes beside its own."""
    model = problem.cost_model
    return -(-(model.fixed + model.partial) // (model.per_tile * model.grain))


def _take(rooms: list[list[int]], grains: int) -> None:
    """Takes so much of the first rooms."""
    while grains:
        taken = min(grains, rooms[0][0])
        grains -= taken
        rooms[0][0] -= taken
        if not rooms[0][0]:
            rooms.pop(0)


def _parts(
    item: Item, owner: int, grains: int, rooms: list[list[int]], problem: Problem
) -> list[tuple[int, Item]]:
    """Cuts the last `grains` of an item into the first rooms; the owner keeps what comes before."""
    size = problem.cost_model.grain
    done = item.visible - grains * size
    parts = [(owner, between(problem, item, 0, done))]
    while done < item.visible:
        room = rooms[0]
        take = min(room[0], (item.visible - done) // size)
        parts.append((room[1], between(problem, item, done, done + take * size)))
        done += take * size
        room[0] -= take
        if not room[0]:
            rooms.pop(0)
    return parts


def between(problem: Problem, item: Item, begin: int, end: int) -> Item:
    """The part of an item from one number of visible key tiles to another."""
    first, last = _key_after(problem, item, begin), _key_after(problem, item, end)
    return replace(item, kv_begin=first, kv_end=last, visible=end - begin)


def _key_after(problem: Problem, item: Item, visible: int) -> int:
    """The key before which the item has seen that many visible key tiles."""
    if visible == item.visible:
        return item.kv_end
    key = item.kv_begin
    while visible:
        visible -= _visible(problem, item, key, min(key + problem.keys, item.kv_end))
        key += problem.keys
    return key


def work_list(problem: Problem, work: list[list[Item]], merges: list[tuple[int, int]]) -> WorkList:
    fields = WORK_ITEM.dtype.names or ()
    ordered = [sorted(items, key=lambda item: item.slot < 0) for items in work]
    records = [
        tuple(getattr(item, field, 0) for field in fields) for items in ordered for item in items
    ]
    return WorkList(
        np.cumsum([0] + [len(items) for items in work]).astype(np.int32),
        np.array(records, WORK_ITEM.dtype),
        np.array(merges, MERGE.dtype),
        np.array([sum(cost_of(problem, item) for item in items) for items in work], np.int64),
    )
