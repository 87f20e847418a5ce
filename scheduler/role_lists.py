"""Plans of two roles: decodes on some CTAs, prefills on the others, and some of both to be claimed.

A CTA works through its decode list, then claims shared ones until none is left, then does the same
with prefills (decision 0043). Lists are numbered by role and CTA: prefills of CTA b are list b, its
decodes are list num_ctas + b, shared prefills s are list 2 * num_ctas + s, and shared decodes s are
list 3 * num_ctas + s. Only CTAs that decode claim decodes; any CTA claims prefills.

Decodes have the first CTAs. Their lines are those of a plan without prefills, and so are their cuts
where nothing is shared. Prefills of all heads lie on one line, for the CTAs behind. Each CTA has an
equal part of most of a line; the rest are shared lists. Whoever is done early takes these: what a
role costs is not known well enough, decodes wait for memory, and some SMs read more slowly.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from warploom.scheduler.layout import MERGE, ROLE_ITEM, Ints, Records
from warploom.scheduler.problem import Problem, WorkList, by_cta
from warploom.scheduler.roles import RolePrices, lists_of
from warploom.scheduler.stream_k import SNAP, Grid, Line, Pieces, boundaries_at, cut, partition
from warploom.scheduler.tiles import Tiles, query_tiles

SHARED = 8  # 1 of so many prefills is for anyone
DECODES_SHARED = 8  # 1 of so many decodes is for any CTA that decodes


def build(problem: Problem) -> WorkList:
    """Plans one batch. `tests/support/plan_text_roles.py` is the same, item by item."""
    assert problem.prices is not None  # checked with the roles
    prefill, decode = problem.by_role()
    of_prefill, of_decode = query_tiles(prefill), query_tiles(decode)
    work = [_length(of_prefill, prefill), _length(of_decode, decode)]
    prefill_ctas, decode_ctas = problem.prices.ctas(work, problem.active_ctas)
    ctas = problem.num_ctas
    own, num_shared = _prefills(of_prefill, prefill, prefill_ctas)
    first = problem.active_ctas - prefill_ctas
    lists = np.where(own.part < prefill_ctas, first, 2 * ctas - prefill_ctas) + own.part
    grid = Grid.of(max(1, decode_ctas), decode.num_kv_heads)
    has_both = len(own.items) > 0 and decode_ctas > 1
    others, shared = _decodes(of_decode, decode, grid, problem.prices if has_both else None)
    decoding = grid.lines * grid.columns if len(others.items) else 0
    decode_lists = np.where(others.part < decoding, ctas, 3 * ctas - decoding) + others.part
    items, merges = _joined(own, others)
    cost = [
        part.cost * unit for part, unit in zip((own, others), problem.prices.units, strict=True)
    ]
    number = np.concatenate((lists, decode_lists))
    found = by_cta(items, merges, number, np.concatenate(cost), lists_of(ctas, 2))
    return replace(found, num_shared=num_shared, num_decodes=decoding, num_shared_decodes=shared)


def _length(tiles: Tiles, problem: Problem) -> int:
    return int(problem.cost_model.of_chunks(tiles.visible).sum()) * problem.num_kv_heads


def _prefills(tiles: Tiles, problem: Problem, ctas: int) -> tuple[Pieces, int]:
    """Pieces of so many CTAs, then those of shared lists as parts behind; and how many of these."""
    if len(tiles.segment) == 0:
        return Pieces.none(), 0
    line = Line.of(tiles, problem.num_kv_heads, problem.cost_model)
    columns, shared, at = places(line, ctas, problem.active_ctas)
    bounds = boundaries_at(at, int(at[columns]) // (columns * SNAP), line)
    found = cut(bounds, line, Grid(1, problem.num_kv_heads, ctas), tiles, problem)
    part = np.where(found.part < columns, found.part, found.part - columns + ctas)
    return Pieces(found.items, found.merges, part, found.cost), shared


def places(line: Line, ctas: int, active: int) -> tuple[int, int, Ints]:
    """Where the line of prefills is cut.

    Returns:
        Own parts, shared parts, and where these begin, with the end: (own + shared + 1,). No part
        is shorter than `CostModel.least_part`, but a single one.
    """
    least, total = line.model.least_part, line.total
    shared = min(ctas, total // SHARED // least) if active > 1 else 0
    rest = total // SHARED if shared else 0
    own = max(1, min(ctas, (total - rest) // least))
    first = np.arange(own) * (total - rest) // own
    last = total - rest + np.arange(shared + 1) * rest // max(shared, 1)
    return own, shared, np.concatenate((first, last))


def _decodes(
    tiles: Tiles, problem: Problem, grid: Grid, prices: RolePrices | None
) -> tuple[Pieces, int]:
    """Pieces of the CTAs of a grid, then those of shared lists as parts behind; how many of these.

    Without prices nothing is shared.
    """
    if prices is not None and len(tiles.segment):
        line = Line.of(tiles, grid.heads, problem.cost_model)
        at = decode_places(line, grid.columns, prices.least_claim(line.model, problem.keys))
        if at is not None:
            bounds = boundaries_at(at, int(at[grid.columns]) // (grid.columns * SNAP), line)
            pieces = cut(bounds, line, grid, tiles, problem)
            return pieces, 2 * grid.columns * grid.lines
    return partition(tiles, problem, grid.lines * grid.columns), 0


def decode_places(line: Line, columns: int, least: int) -> Ints | None:
    """Where a line of decodes is cut: own parts, as many shared ones, and as many half as long.

    The long ones are claimed first, so that few lists must be opened and the last ones are short.

    Returns:
        (3 * columns + 1,) where parts begin, with the end; None if the shortest were below `least`.
    """
    total, rest = line.total, line.total // DECODES_SHARED
    if rest // (3 * columns) < least:
        return None
    number = np.arange(2 * columns + 1)
    halves = np.minimum(2 * number, columns + number)
    first = np.arange(columns) * (total - rest) // columns
    return np.concatenate((first, total - rest + halves * rest // (3 * columns)))


def _joined(prefills: Pieces, decodes: Pieces) -> tuple[Records, Records]:
    """Items that say their role, and merges; slots of decodes come behind those of prefills."""
    items: Records = np.concatenate((prefills.items, decodes.items)).view(ROLE_ITEM.dtype)
    merges: Records = np.concatenate((prefills.merges, decodes.merges)).astype(MERGE.dtype)
    count, slots = len(prefills.items), int(prefills.merges["num_slots"].sum())
    is_cut = items["slot"][count:] >= 0
    items["slot"][count:] += is_cut * np.int32(slots)
    items["merge"][count:] += is_cut * np.int32(len(prefills.merges))
    merges["first_slot"][len(prefills.merges) :] += slots
    items["role"][count:] = 1
    return items, merges
