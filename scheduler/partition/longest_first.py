"""Work lists, longest first: Algorithm 1 and the levelling of loads, without a loop over items."""

from __future__ import annotations

import numpy as np

from warploom.scheduler.model.layout import MERGE, Ints, Records
from warploom.scheduler.model.problem import Problem, WorkList, by_cta
from warploom.scheduler.model.tiles import Tiles, key_after, query_tiles
from warploom.scheduler.partition.balance import Moves, deal_and_level
from warploom.scheduler.partition.ordering import assigning_order


def build(problem: Problem) -> WorkList:
    """Plans one batch. `tests/support/plan_text.py` is the same, item by item."""
    tiles, model = query_tiles(problem), problem.cost_model
    cost = model.of_chunks(tiles.visible)
    mean = -(-int(cost.sum()) * problem.num_kv_heads // problem.active_ctas)
    tile, head = assigning_order(problem, cost, tiles.segment, mean)
    cost, items = cost[tile], tiles.items(tile, head)
    visible, merges = tiles.visible[tile], np.zeros(0, MERGE.dtype)
    cta, last, moves = deal_and_level(cost, visible, mean, problem.active_ctas, model)
    if moves is not None:
        owner = last[moves.owner]
        pieces, merges = _cut(items, owner, tiles.take(tile[owner]), moves, problem)
        items = np.concatenate((items, pieces))
        cta, cost = moves.join(cta, cost, owner, model)
    return by_cta(items, merges, cta, cost, problem.num_ctas)


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
