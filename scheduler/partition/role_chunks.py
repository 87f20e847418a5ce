"""Plans of two roles whose bits do not depend on the batch: either is cut at fixed multiples.

A segment's role follows from its own rows (`roles.roles_of`), and its chunks from its own tiles
(`fixed`), so a request's partial results and their order are the same among any neighbours. Which
CTA computes a chunk does not matter to its bits: lists are those of `role_lists`, of whole chunks.

Either role's chunks are assigned longest first to the CTAs that have the role by its price. The
last ones are in shared lists instead, mostly one in each, for whoever is done early: all but the
first chunk of each CTA where SLICES lists for each that has the role hold them, else about 1 of
SHARED.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from warploom.scheduler.model.layout import Ints
from warploom.scheduler.model.problem import Problem, WorkList
from warploom.scheduler.model.roles import SLICES
from warploom.scheduler.partition.balance import assign
from warploom.scheduler.partition.fixed import Chunks
from warploom.scheduler.partition.pieces import Pieces
from warploom.scheduler.partition.role_lists import SHARED, RoleLists, in_lists


def build(problem: Problem) -> WorkList:
    """Plans one batch."""
    assert problem.prices is not None  # checked with the roles
    prefill, decode = (Chunks.of(own) for own in problem.by_role())
    prefill_ctas, decode_ctas = _ctas(problem, (prefill, decode))
    # As in `role_lists` a single CTA shares nothing, and decodes are shared beside prefills alone.
    shared = SLICES[0] - 1 if problem.active_ctas > 1 else 0
    prefills = _lists(prefill, prefill_ctas, shared * prefill_ctas, 1)
    shared = SLICES[1] - 1 if prefill_ctas and decode_ctas > 1 else 0
    least = problem.prices.least_claim(decode.problem.cost_model, decode.problem.keys)
    decodes = _lists(decode, decode_ctas, shared * decode_ctas, least)
    return in_lists(problem, prefills, decodes)


def _ctas(problem: Problem, roles: Sequence[Chunks]) -> tuple[int, int]:
    """CTAs of each role: by price, but none without a chunk that the other role has work for."""
    assert problem.prices is not None
    active, counts = problem.active_ctas, [chunks.count for chunks in roles]
    prefill, decode = problem.prices.ctas([chunks.total for chunks in roles], active)
    if active > 1 and all(counts):
        prefill = min(active - min(decode, counts[1]), counts[0])
        decode = active - prefill
    return min(prefill, counts[0]), min(decode, counts[1])


def _lists(chunks: Chunks, ctas: int, room: int, least: int) -> RoleLists:
    """The chunks of a role on so many CTAs.

    Args:
        chunks: all.
        ctas: at most as many as chunks, and none if there are none.
        room: shared lists, at most.
        least: mean cost of a shared list, at least.
    """
    if ctas == 0:
        return RoleLists(Pieces.none(), 0, 0)
    items, merges, cost = chunks.items(ctas)
    late, lists = _late(cost, ctas, room, least)
    early = len(cost) - late
    own, _ = assign(cost[:early], ctas)
    behind = ctas + np.arange(late) * lists // max(1, late)
    return RoleLists(Pieces(items, merges, np.concatenate((own, behind)), cost), ctas, lists)


def _late(cost: Ints, ctas: int, room: int, least: int) -> tuple[int, int]:
    """How many items are in shared lists, the last ones, and how many lists these are.

    Each CTA has one item for its own at least.
    """
    total = np.cumsum(cost[::-1])
    most = int(np.searchsorted(total, total[-1] // SHARED, side="right"))  # 1 of SHARED of the cost
    late = min(len(cost) - ctas, max(most, room)) if room else 0
    lists = min(room, late, int(total[late - 1]) // least) if late else 0
    return (late, lists) if lists else (0, 0)
