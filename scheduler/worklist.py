"""Work lists, longest first: Algorithm 1 and the levelling of loads, without a loop over items."""

from __future__ import annotations

import numpy as np

from warploom.scheduler import role_lists, stream_k
from warploom.scheduler.balance import Moves, assign, deal_and_level
from warploom.scheduler.fixed import fixed_chunks, number_slots
from warploom.scheduler.layout import MERGE, WORK_ITEM, Ints, Records
from warploom.scheduler.problem import TOLERANCE, Problem, WorkList, by_cta, sections
from warploom.scheduler.tiles import Tiles, key_after, query_tiles


def build(problem: Problem) -> WorkList:
    """Plans one batch. `tests/support/plan_text.py` is the same, item by item."""
    if problem.smaller:
        return role_lists.build(problem)
    if problem.stream_k:
        return stream_k.build(problem)
    tiles = query_tiles(problem)
    if problem.split_size is None:
        chunks, tile = tiles, np.arange(len(tiles.segment))
    else:
        chunks, tile = fixed_chunks(tiles, problem, problem.split_size)
    model = problem.cost_model
    cost = model.of_chunks(chunks.visible)
    mean = -(-int(cost.sum()) * problem.num_kv_heads // problem.active_ctas)
    chunk, head = longest_first(cost, chunks.segment, mean, problem.num_kv_heads)
    if problem.section_keys is not None:
        order = np.argsort(sections(problem, chunks.segment[chunk], head), kind="stable")
        chunk, head = chunk[order], head[order]
    cost = cost[chunk]
    items = _records(chunks).take(chunk)
    items["kv_head"] = head
    if problem.split_size is not None:
        cta, _ = assign(cost, problem.active_ctas)
        merges = number_slots(items, tile, chunk, head, problem.num_kv_heads)
        return by_cta(items, merges, cta, cost, problem.num_ctas)
    visible, merges = chunks.visible[chunk], np.zeros(0, MERGE.dtype)
    cta, last, moves = deal_and_level(cost, visible, mean, problem.active_ctas, model)
    if moves is not None:
        owner = last[moves.owner]
        pieces, merges = _cut(items, owner, chunks.take(chunk[owner]), moves, problem)
        cost[owner[moves.opens]] = model.of_chunks(moves.begin[moves.opens])
        cost = np.concatenate((cost, model.of_chunks(moves.end - moves.begin)))
        items, cta = np.concatenate((items, pieces)), np.concatenate((cta, moves.cta))
    return by_cta(items, merges, cta, cost, problem.num_ctas)


def longest_first(cost: Ints, segment: Ints, mean: int, num_heads: int) -> tuple[Ints, Ints]:
    """Repeats chunks for every head and sorts the items by descending cost, up to the tolerance.

    Items of like cost stay in the order (segment, head, rows, keys), so that items assigned at the
    same time mostly share the keys of one head.

    Args:
        cost: (n,) cost of each chunk, ordered by segment, rows, keys.
        segment: (n,) their segments.
        mean: mean load of a CTA.
        num_heads: key/value heads.

    Returns:
        (n * num_heads,) chunk and head of each item.
    """
    if len(cost) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    grade = cost // max(1, mean // TOLERANCE)
    falling = grade.max() - grade
    if falling.max() < 2**16:
        falling = falling.astype(np.uint16)  # NumPy sorts these by radix
    order = np.argsort(falling, kind="stable")
    # In a run of one grade and segment, heads are the outer loop.
    falling, segment = falling[order], segment[order]
    opens = np.ones(len(order), bool)
    opens[1:] = (falling[1:] != falling[:-1]) | (segment[1:] != segment[:-1])
    start = np.flatnonzero(opens)
    length = np.diff(start, append=len(order))
    run = np.cumsum(opens) - 1
    place = (np.arange(len(order)) + (num_heads - 1) * start[run])[:, None]
    place = place + np.arange(num_heads) * length[run][:, None]
    chunk = np.empty(place.size, np.int64)
    head = np.empty(place.size, np.int64)
    chunk[place] = order[:, None]
    head[place] = np.arange(num_heads)
    return chunk, head


def _records(chunks: Tiles) -> Records:
    items = np.zeros(len(chunks.segment), WORK_ITEM.dtype)
    for field in ("segment", "row_begin", "kv_begin", "kv_end"):
        items[field] = getattr(chunks, field)
    items["slot"] = items["merge"] = -1
    return items


def _cut(
    items: Records, owner: Ints, tiles: Tiles, moves: Moves, problem: Problem
) -> tuple[Records, Records]:
    """Makes the pieces' items, shortens their owners and numbers the slots of both.

    Args:
        items: records; the owners are changed in place.
        owner: (pieces,) index of the item that each piece is cut from.
        tiles: (pieces,) tile of each piece.

    Returns:
        (pieces,) items and the merges.
    """
    opens = moves.opens
    begin = key_after(tiles, moves.begin, problem)
    end = np.where(moves.end == tiles.visible, tiles.kv_end, np.roll(begin, -1))
    merge = np.cumsum(opens) - 1
    slot = np.arange(len(owner)) + merge + 1  # one before the first piece is the owner's
    pieces = items.take(owner)
    pieces["kv_begin"], pieces["kv_end"] = begin, end
    pieces["merge"], pieces["slot"] = merge, slot
    kept = owner[opens]
    items["kv_end"][kept] = begin[opens]
    items["merge"][kept], items["slot"][kept] = merge[opens], slot[opens] - 1
    merges = np.zeros(len(kept), MERGE.dtype)
    merges["first_slot"] = slot[opens] - 1
    merges["num_slots"] = np.bincount(merge) + 1
    return pieces, merges
