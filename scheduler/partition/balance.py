"""Assigns items to CTAs, longest first, each to the least-loaded CTA; then levels the loads.

The queue of Algorithm 1 is one sorted array of codes `load * num_ctas + cta`, so that equal loads
are served by the lowest CTA, as in a priority queue of (load, cta).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from warploom.scheduler.model.constants import TOLERANCE, TRIED, WORTH_CUTTING, WORTH_SAVING
from warploom.scheduler.model.cost import CostModel
from warploom.scheduler.model.layout import Ints

# A round is a handful of array operations, whose overhead does not depend on how many items the
# round assigns: a round of fewer items than this costs more than pushing them through a heap.
SHORT_ROUND = 24
# Switching to a heap and back copies and sorts the whole queue, so a heap must assign many items
# each time; but not all the rest, since falling costs may make rounds long again.
HEAP_BLOCK = 512


def assign(cost: Ints, num_ctas: int) -> tuple[Ints, Ints]:
    """Gives every item, in order, to the CTA with the least load (FlashInfer, Algorithm 1 lines
    6-13).

    Works in rounds: the next items go to the CTAs in queue order, until a CTA already served in
    this round would come first again. The result equals popping and pushing one by one.

    Args:
        cost: (n,) costs, assigned from the first to the last.
        num_ctas: CTAs that take work.

    Returns:
        (n,) CTA of each item, and the queue: (num_ctas,) codes `load * num_ctas + cta`, ascending.
    """
    queue = np.arange(num_ctas, dtype=np.int64)
    step = cost * num_ctas
    code = np.empty_like(step)
    done = 0
    while done < len(step):
        after = queue[: len(step) - done] + step[done : done + num_ctas]
        overtaken = queue[1 : len(after)] > np.minimum.accumulate(after[:-1])
        take = int(overtaken.argmax()) + 1 if overtaken.any() else len(after)
        if take < SHORT_ROUND:
            block = slice(done, done + HEAP_BLOCK)
            code[block], queue = _deal_one_by_one(step[block], queue)
            done += HEAP_BLOCK
            continue
        code[done : done + take] = queue[:take]
        queue[:take] = after[:take]
        queue.sort()
        done += take
    return code % num_ctas, queue


def _deal_one_by_one(step: Ints, queue: Ints) -> tuple[list[int], Ints]:
    heap = queue.tolist()  # sorted, hence a heap
    codes = []
    for cost in step.tolist():
        codes.append(heap[0])
        heapq.heapreplace(heap, heap[0] + cost)
    return codes, np.sort(np.array(heap, dtype=np.int64))


def deal_and_level(
    cost: Ints, visible: Ints, mean: int, num_ctas: int, model: CostModel
) -> tuple[Ints, Ints, Moves | None]:
    """Assigns items, then cuts off what lies above the mean load.

    Args:
        cost, visible: (n,) costs and visible key tiles, assigned from the first to the last.
        mean: mean load.
        num_ctas: CTAs that take work.
        model: costs.

    Returns:
        (n,) CTA of each item, (num_ctas,) last item of each CTA, and the pieces that move, if any.
    """
    cta, queue = assign(cost, num_ctas)
    last = np.zeros(num_ctas, np.int64)
    if len(cost) == 0:
        return cta, last, None
    last[cta] = np.arange(len(cta))  # for repeated indices NumPy keeps the last value
    return cta, last, level(queue, visible[last], mean, model)


@dataclass(frozen=True)
class Moves:
    """Pieces cut from the end of each owner's last item, in key order, owner after owner.

    Attributes:
        owner: (pieces,) CTA whose last item the piece is cut from.
        cta: (pieces,) CTA that takes the piece.
        begin, end: (pieces,) visible key tiles of the owner's item, half open. The last piece of an
            item ends with the item; the owner keeps what comes before the first piece.
    """

    owner: Ints
    cta: Ints
    begin: Ints
    end: Ints

    @property
    def opens(self) -> npt.NDArray[np.bool_]:
        """(pieces,) true for the first piece of an owner."""
        return np.append(True, self.owner[1:] != self.owner[:-1])

    def join(self, cta: Ints, visible: Ints, item: Ints) -> tuple[Ints, Ints]:
        """CTA and visible key tiles of all items, with owners' items shortened, then of the pieces.

        Args:
            cta, visible: (n,) of the items before cutting.
            item: (pieces,) index of the item that each piece is cut from.
        """
        visible, opens = visible.copy(), self.opens
        visible[item[opens]] = self.begin[opens]
        return np.append(cta, self.cta), np.append(visible, self.end - self.begin)


def level(queue: Ints, visible: Ints, mean: int, model: CostModel) -> Moves | None:
    """Cuts what lies above the mean load off the last items and moves it to CTAs below the mean.

    Algorithm 1 cuts a tile only if it is longer than the mean load, before assigning; 192 equal
    tiles on 132 CTAs then keep 60 CTAs busy twice as long as the others. Here the mean load is the
    limit of a CTA instead. The last item of a CTA was given to it while it was the least loaded,
    with at most the mean load, so only that item can cross the limit.

    With E CTAs that give and R that take, E + R <= num_ctas and R >= 1: all parts laid end to end
    over all rooms make at most E + R - 1 pieces. Each owner keeps one part. So there are at most
    2E + R - 1 <= 2 * num_ctas - 2 partial results: the bound of FlashInfer, appendix D.3. Sizes are
    whole grains on both sides, so rounding adds no piece.

    A piece costs the taking CTA more than its keys, and the owner also pays for the partial result
    of the rest that it keeps. So an owner above the limit gives that cost away, too. Of the
    E + R - 1 pieces, the first one in each room is paid for by leaving `piece` of that room free;
    the E - 1 others are paid for by `opening` grains in front of each part but one. The limit is
    the lowest at which the rooms suffice.

    Args:
        queue: codes that `assign` returned.
        visible: (num_ctas,) visible key tiles of each CTA's last item, 0 without items.
        mean: mean load.
        model: costs.

    Returns:
        The pieces, or None if cutting is not worth it.
    """
    loads, ctas = queue // len(queue), queue % len(queue)
    if loads[-1] <= mean + mean // WORTH_CUTTING:
        return None
    grain, piece = model.per_tile * model.grain, model.fixed + model.partial
    opening = -(-piece // grain)  # grains of room that a part takes beside its own
    # Neither an owner's rest nor a piece is shorter than a grain; and an owner gains nothing by
    # giving less than its partial result costs.
    most = np.maximum(visible[ctas] // model.grain - 1, 0)
    most[most * grain <= model.partial] = 0
    # The least load that each CTA can be left with: below the largest of these, a lower limit would
    # cut without reducing the largest load.
    kept = np.where(most > 0, loads + model.partial - most * grain, loads)

    def given_and_room(limit: Ints) -> tuple[Ints, Ints]:
        """(limits, num_ctas) grains that each CTA gives, and grains that it has room for."""
        limit = limit[:, None]
        given = np.clip(-((limit - model.partial - loads) // grain), 0, most) * (loads > limit)
        return given, np.maximum((limit - piece - loads) // grain, 0)

    def fits(limit: Ints) -> npt.NDArray[np.bool_]:
        given, room = given_and_room(limit)
        needed = given.sum(axis=1) + opening * ((given > 0).sum(axis=1) - 1)
        enough: npt.NDArray[np.bool_] = needed <= room.sum(axis=1)
        return enough

    limit = lowest_fitting(limits_worth_cutting(mean, int(kept.max()), int(loads[-1])), fits)
    if limit is None:
        return None
    given, room = (grains[0] for grains in given_and_room(np.array([limit])))
    return _lay_out(given, opening, room, visible[ctas], ctas, model.grain)


def limits_worth_cutting(mean: int, kept: int, largest: int) -> range:
    """Candidate load limits: from about the mean to the highest limit that is worth cutting for.

    Args:
        mean: mean load.
        kept: the most that any CTA keeps, however much it gives.
        largest: largest load of a CTA.
    """
    return range(max(mean + mean // TOLERANCE, kept), largest - largest // WORTH_SAVING + 1)


def lowest_fitting(limits: range, fits: Callable[[Ints], npt.NDArray[np.bool_]]) -> int | None:
    """The lowest limit that fits, given that all limits above a fitting one fit; None if none does.

    Args:
        limits: limits to choose from.
        fits: returns for (n,) ascending limits which of them fit.
    """
    while limits:
        tried = limits[:: -(-len(limits) // TRIED)]
        answers = fits(np.asarray(tried, np.int64))
        best = int(answers.argmax()) if answers.any() else len(tried)
        if best < len(tried) and (best == 0 or len(tried) == len(limits)):
            return tried[best]
        end = limits.stop if best == len(tried) else tried[best] + 1
        limits = range(tried[best - 1] + 1, end)
    return None


def _lay_out(
    given: Ints, opening: int, room: Ints, visible: Ints, ctas: Ints, grain: int
) -> Moves | None:
    """Lays the owners' grains end to end over the rooms, emptiest CTA first; cuts at each end.

    In front of each part but the first lie `opening` grains, which take room but hold no keys.
    """
    owners, rooms = np.flatnonzero(given), np.flatnonzero(room)
    if len(owners) == 0:
        return None
    owner_end = np.cumsum(given[owners]) + opening * np.arange(len(owners))
    room_end = np.cumsum(room[rooms])
    total = owner_end[-1]
    end = np.sort(np.concatenate((owner_end, room_end[room_end < total])))
    end = end[np.append(True, end[1:] > end[:-1])]
    begin = np.append(0, end[:-1])
    owner = np.searchsorted(owner_end, begin, side="right")
    taker = rooms[np.searchsorted(room_end, begin, side="right")]
    begin = np.maximum(begin, (owner_end - given[owners])[owner])
    is_piece = begin < end
    owner, taker, begin, end = owner[is_piece], taker[is_piece], begin[is_piece], end[is_piece]
    # An item's last grain ends with the item, so positions are counted back from the item's end.
    shift = visible[owners[owner]] - owner_end[owner] * grain
    return Moves(ctas[owners[owner]], ctas[taker], begin * grain + shift, end * grain + shift)
