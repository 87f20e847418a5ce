"""Plans of two roles whose bits do not depend on the batch: both are cut at fixed multiples.

A segment's role follows from its own rows (`roles.roles_of`), and its chunks from its own tiles
(`fixed`), so a request's partial results and their order are the same whatever else is in the
batch. Which CTA computes a chunk does not matter to its bits: lists are laid out as in
`role_lists`, but hold whole chunks.

Each role's chunks are assigned longest first to the CTAs that the prices give to the role. The last
chunks go to shared lists, mostly one in each, for CTAs that are done early. These are all but the
first chunk of each CTA if PREFILL_SLICES or DECODE_SLICES lists for each CTA of the role hold them,
else about 1/_PER_SHARED_CHUNK of the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from warploom.scheduler.model.constants import DECODE_SLICES, PREFILL_SLICES
from warploom.scheduler.model.layout import Ints
from warploom.scheduler.model.problem import Problem, WorkList
from warploom.scheduler.partition.balance import assign
from warploom.scheduler.partition.fixed import Chunks
from warploom.scheduler.partition.pieces import Pieces
from warploom.scheduler.partition.role_lists import RoleLists, joined_lists

_PER_SHARED_CHUNK = 8  # chunks with 1/8 of a role's cost are shared


def build(problem: Problem) -> WorkList:
    """Plans one batch."""
    assert problem.prices is not None  # checked with the roles
    prefill, decode = (Chunks.of(own) for own in problem.by_role())
    prefill_ctas, decode_ctas = _ctas(problem, (prefill, decode))
    # As in `role_lists` a single CTA shares nothing, and decodes are shared only beside prefills.
    shared = PREFILL_SLICES - 1 if problem.active_ctas > 1 else 0
    prefills = _lists(prefill, prefill_ctas, shared * prefill_ctas, 1)
    shared = DECODE_SLICES - 1 if prefill_ctas and decode_ctas > 1 else 0
    least = problem.prices.least_claim(decode.problem.cost_model, decode.problem.keys)
    decodes = _lists(decode, decode_ctas, shared * decode_ctas, least)
    return joined_lists(problem, prefills, decodes)


def _ctas(problem: Problem, roles: Sequence[Chunks]) -> tuple[int, int]:
    """CTAs of each role by price, none without a chunk if the other role has work for it."""
    assert problem.prices is not None
    active, counts = problem.active_ctas, [chunks.count for chunks in roles]
    prefill, decode = problem.prices.ctas([chunks.total for chunks in roles], active)
    if active > 1 and all(counts):
        prefill = min(active - min(decode, counts[1]), counts[0])
        decode = active - prefill
    return min(prefill, counts[0]), min(decode, counts[1])


def _lists(chunks: Chunks, ctas: int, room: int, least: int) -> RoleLists:
    """Lists of the chunks of a role on `ctas` CTAs.

    Args:
        chunks: all chunks of the role.
        ctas: CTAs of the role, at most one per chunk; 0 if there are no chunks.
        room: most shared lists.
        least: least mean cost of a shared list.
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
    """How many of the last items go to shared lists, and how many shared lists there are.

    Each CTA owns at least one item.
    """
    total = np.cumsum(cost[::-1])
    most = int(np.searchsorted(total, total[-1] // _PER_SHARED_CHUNK, side="right"))
    late = min(len(cost) - ctas, max(most, room)) if room else 0
    lists = min(room, late, int(total[late - 1]) // least) if late else 0
    return (late, lists) if lists else (0, 0)
