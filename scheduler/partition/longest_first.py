"""Work lists, longest first: Algorithm 1 and the levelling of loads, without a loop over items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from warploom.scheduler.model.layout import MERGE, Ints, Records
from warploom.scheduler.model.problem import Problem, WorkList, by_cta
from warploom.scheduler.model.tiles import Tiles, key_after, query_tiles
from warploom.scheduler.partition.balance import Moves, deal_and_level
from warploom.scheduler.partition.ordering import assigning_order


def build(problem: Problem) -> WorkList:
    """Plans one batch. `tests/support/plan_text.py` is the same, item by item."""
    found = assign(problem)
    cost = problem.cost_model.of_chunks(found.visible)
    return by_cta(found.items, found.merges, found.cta, cost, problem.num_ctas)


@dataclass(frozen=True)
class Assigned:
    """Assigned items of a problem of one tile; shape (n,) each but for the merges.

    Attributes:
        items: WORK_ITEM records: first whole items, or what is left of them, then the pieces that
            level loads; each CTA's in the order in which it runs them.
        merges: MERGE records.
        cta: CTA of each item.
        visible: visible key tiles of each item.
        pieces: number of pieces.
    """

    items: Records
    merges: Records
    cta: Ints
    visible: Ints
    pieces: int


def assign(problem: Problem) -> Assigned:
    """Gives all items to CTAs."""
    tiles, model = query_tiles(problem), problem.cost_model
    cost = model.of_chunks(tiles.visible)
    mean = -(-int(cost.sum()) * problem.num_kv_heads // problem.active_ctas)
    tile, head = assigning_order(problem, cost, tiles.segment, mean)
    items, visible = tiles.items(tile, head), tiles.visible[tile]
    cta, last, moves = deal_and_level(cost[tile], visible, mean, problem.active_ctas, model)
    if moves is None:
        return Assigned(items, np.zeros(0, MERGE.dtype), cta, visible, 0)
    owner = last[moves.owner]
    pieces, merges = _cut(items, owner, tiles.take(tile[owner]), moves, problem)
    cta, visible = moves.join(cta, visible, owner)
    return Assigned(np.concatenate((items, pieces)), merges, cta, visible, len(pieces))


def _cut(
    items: Records, owner: Ints, tiles: Tiles, moves: Moves, problem: Problem
) -> tuple[Records, Records]:
    """Makes items of the pieces, shortens the items they are cut from, numbers the slots of both.

    Args:
        items: records; those in `owner` are changed in place.
        owner: (pieces,) index of the item that each piece is cut from.
        tiles: (pieces,) tile of each piece.

    Returns:
        (pieces,) items and the merges.
    """
    opens = moves.opens
    begin = key_after(tiles, moves.begin, problem)
    end = np.where(moves.end == tiles.visible, tiles.kv_end, np.roll(begin, -1))
    merge = np.cumsum(opens) - 1
    slot = np.arange(len(owner)) + merge + 1  # the slot before the first piece is the owner's
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
