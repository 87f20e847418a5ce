"""Plans of two roles: decodes on some CTAs, prefills on the others, and shared lists of both.

A CTA works through its own decode list, then claims shared decode lists until none is left, then
does the same with prefills (decision 0043). Lists are numbered by role and CTA: prefills of CTA b
are list b, its decodes are list num_ctas + b, and shared lists of prefills and decodes begin at
SHARED_PREFILLS and SHARED_DECODES times num_ctas. Only CTAs that decode claim decodes; any CTA
claims prefills.

The first CTAs decode, the CTAs behind prefill. Each CTA owns an equal part of most of a line; the
rest of the line becomes shared lists, which CTAs that are done early claim: costs of roles are not
known well enough, decodes wait for memory, and some SMs read more slowly.

*Decodes* lie on the lines of a plan without prefills, cut as there if nothing is shared. Shared
lists have up to ENDS lengths, long ones first, so that few lists are opened and the last CTA is
late by part of a short list. (A boundary that moves to the end of an item may leave a short list
empty.)

*Prefills* may be dealt longest first (`dealt_prefills`), where CTAs have few of them, or if there
are no decodes. Else those of all heads lie on one line, which is cut in one of three ways:

- `_whole_cuts`: short prefills are not cut (`RolePrices.shortest_cut`), unless they are few and one
  would exceed an equal part by more than cutting costs. Lists hold whole prefills, mostly one, and
  prefilling CTAs claim the next list, as do decoding CTAs that are done. Where the cache holds
  their keys, a tile of all heads comes before the next tile, so that the last tiles of a request,
  of all heads, are its shortest.
- `_round_cuts`: where prefills read more keys than the cache holds, and there are enough prefills,
  most of the line becomes lists of whole prefills, a few rounds in the order of the line; the rest
  has ENDS lengths. CTAs then work on tiles of the same heads at the same time, and their keys are
  read from memory once. With an equal part of the line for each CTA all heads are read at once, at
  different places.
- `_equal_cuts`: else equal parts. With half as many prefills as CTAs, or fewer, the rest of the
  line would be pieces of one or two prefills, which one CTA merges. So nothing is shared, and each
  prefill is cut into equal parts, unless more than 1/PER_IDLE_OF_FEW of the CTAs would be idle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from warploom.scheduler.model.constants import (
    ENDS,
    LATE,
    PER_IDLE_OF_FEW,
    PER_SHARED_DECODE,
    PER_SHARED_PREFILL,
    PREFILL_SLICES,
    ROUNDS,
    SNAP,
)
from warploom.scheduler.model.layout import (
    MERGE,
    ROLE_ITEM,
    SHARED_DECODES,
    SHARED_PREFILLS,
    Ints,
    Records,
)
from warploom.scheduler.model.problem import Problem, WorkList, by_cta
from warploom.scheduler.model.roles import num_lists
from warploom.scheduler.model.tiles import Tiles, query_tiles
from warploom.scheduler.partition.dealt_prefills import are_dealt, deal
from warploom.scheduler.partition.pieces import Pieces
from warploom.scheduler.partition.stream_k import (
    Grid,
    Line,
    boundaries_at,
    cut,
    fitting_slices,
    partition,
)


def build(problem: Problem) -> WorkList:
    """Plans one batch. `tests/support/plan_text_roles.py` is the same, item by item."""
    prefill, decode = problem.by_role()
    return share_out(query_tiles(prefill), query_tiles(decode), problem)


def share_out(of_prefill: Tiles, of_decode: Tiles, problem: Problem) -> WorkList:
    """Lists of the work on the tiles of both roles; every key/value head has the same tiles.

    Args:
        of_prefill, of_decode: query tiles of each role.
        problem: the problem of both roles.
    """
    assert problem.prices is not None  # checked with the roles
    prefill, decode = problem.by_role()
    work = [_length(of_prefill, prefill), _length(of_decode, decode)]
    prefill_ctas, decode_ctas = problem.prices.ctas(work, problem.active_ctas)
    has_prefills, has_decodes = len(of_prefill.segment) > 0, len(of_decode.segment) > 0
    prefills = RoleLists(Pieces.none(), prefill_ctas, 0)
    decodes = RoleLists(Pieces.none(), 0, 0)
    if has_prefills:
        prefills = _prefill_lists(of_prefill, prefill, prefill_ctas, is_alone=not has_decodes)
    if has_decodes:
        are_shared = has_prefills and decode_ctas > 1
        decodes = _decode_lists(of_decode, decode, max(1, decode_ctas), are_shared)
    return joined_lists(problem, prefills, decodes)


@dataclass(frozen=True)
class RoleLists:
    """All lists of one role.

    Attributes:
        pieces: owners below `ctas` are CTAs, those from `ctas` on are shared lists.
        ctas: CTAs that may own a list.
        shared: number of shared lists, which CTAs claim.
    """

    pieces: Pieces
    ctas: int
    shared: int


def joined_lists(problem: Problem, prefills: RoleLists, decodes: RoleLists) -> WorkList:
    """Joins both: decodes have the first CTAs, prefills the last of the active CTAs."""
    assert problem.prices is not None
    ctas, both = problem.num_ctas, (prefills, decodes)
    first = problem.active_ctas - prefills.ctas, ctas
    behind = SHARED_PREFILLS * ctas - prefills.ctas, SHARED_DECODES * ctas - decodes.ctas
    number, cost = [], []
    for role, lists in enumerate(both):
        owner = lists.pieces.owner
        number.append(np.where(owner < lists.ctas, first[role], behind[role]) + owner)
        cost.append(lists.pieces.cost * problem.prices.units[role])
    items, merges = _joined(prefills.pieces, decodes.pieces)
    found = by_cta(
        items, merges, np.concatenate(number), np.concatenate(cost), num_lists(ctas, len(both))
    )
    return replace(
        found, num_shared_prefills=prefills.shared, num_decode_ctas=decodes.ctas,
        num_shared_decodes=decodes.shared,
    )  # fmt: skip


def _length(tiles: Tiles, problem: Problem) -> int:
    return int(problem.cost_model.of_chunks(tiles.visible).sum()) * problem.num_kv_heads


def _prefill_lists(tiles: Tiles, problem: Problem, ctas: int, is_alone: bool) -> RoleLists:
    """Lists of prefills on `ctas` CTAs: dealt, or cut from one line of all heads.

    Args:
        tiles: at least one.
        problem: the prefill part of the problem.
        ctas: CTAs that prefill.
        is_alone: there are no decodes.
    """
    assert problem.prices is not None  # checked with the roles
    if problem.may_deal and is_alone:
        return _dealt(problem, ctas, is_alone)
    active = problem.active_ctas
    line = Line.of(tiles, problem.num_kv_heads, problem.cost_model)
    are_short = active > 1 and line.visible.max() < _least_cut(line, problem, ctas)
    exceeds_cache = active > 1 and _exceeds_cache(tiles, problem)
    rounds = rounds_of(len(line.tile), ctas, active) if exceeds_cache else NO_ROUNDS
    may_deal = problem.may_deal and problem.prices.may_deal_beside_decodes
    if may_deal and are_dealt(
        len(line.tile), ctas, problem.group_size, are_short, has_all_rounds=rounds.are_all
    ):
        return _dealt(problem, ctas, is_alone)
    if are_short:
        if not exceeds_cache:
            line = Line.of(tiles, problem.num_kv_heads, problem.cost_model, by_tile=True)
        cuts = _whole_cuts(line, ctas, active)
    else:
        cuts = _round_cuts(line, rounds, ctas) or _equal_cuts(line, ctas, active)
    return cuts.lists(line, Grid(1, problem.num_kv_heads, ctas), tiles, problem)


def _dealt(problem: Problem, ctas: int, is_alone: bool) -> RoleLists:
    pieces, shared = deal(problem, ctas, is_alone)
    return RoleLists(pieces, ctas, shared)


@dataclass(frozen=True)
class Cuts:
    """How a line is cut into slices, which become lists.

    Attributes:
        own: slices that CTAs own, the first ones; CTAs claim the others.
        first: (n,) where the slices before `end` begin.
        end: where the last of them ends.
        per_length: slices of each length behind `end`.
        lengths: number of these lengths, each half of the one before.
    """

    own: int
    first: Ints
    end: int
    per_length: int = 0
    lengths: int = 1

    @classmethod
    def equal(cls, own: int, end: int, per_length: int, lengths: int = 1) -> Cuts:
        """Equal own slices up to `end`."""
        return cls(own, np.arange(own) * end // own, end, per_length, lengths)

    @property
    def number(self) -> int:
        return len(self.first) + self.per_length * self.lengths

    def lists(self, line: Line, grid: Grid, tiles: Tiles, problem: Problem) -> RoleLists:
        """The lists of this line with these cuts, for each of the equal lines of the grid."""
        units = np.repeat(2 ** np.arange(self.lengths)[::-1], self.per_length)
        behind = np.append(0, np.cumsum(units)) * (line.total - self.end) // max(1, units.sum())
        at = np.concatenate((self.first, self.end + behind))
        snap = self.end // (len(self.first) * SNAP)
        found = cut(boundaries_at(at, snap, line), line, grid, tiles, problem)
        ctas, own = grid.lines * grid.slices, grid.lines * self.own
        owner = np.where(found.owner < own, found.owner, found.owner - own + ctas)
        shared = grid.lines * (self.number - self.own)
        return RoleLists(replace(found, owner=owner), ctas, shared)


def shortest_in(lengths: int) -> int:
    """Total of one slice of each length, in units of the shortest: 1 + 2 + 4 + ..."""
    return (1 << lengths) - 1


def _whole_cuts(line: Line, ctas: int, active: int) -> Cuts:
    """Lists of whole prefills alone."""
    each, lists = whole_lists(len(line.tile), ctas, active)
    return Cuts(min(ctas, lists), line.begin[np.arange(lists) * each], line.total)


def _round_cuts(line: Line, rounds: Rounds, ctas: int) -> Cuts | None:
    """Rounds of lists of whole prefills, and ENDS lengths of shared slices behind them.

    None without rounds, or if the shortest of these slices would be too short.
    """
    if rounds.lists == 0:
        return None
    end = int(line.begin[rounds.each * rounds.lists])
    ends = min(ctas, (line.total - end) // (shortest_in(ENDS) * line.model.least_slice))
    if ends == 0:
        return None
    return Cuts(ctas, line.begin[np.arange(rounds.lists) * rounds.each], end, ends, ENDS)


def _equal_cuts(line: Line, ctas: int, active: int) -> Cuts:
    """Equal own slices of most of the line, and equal shared slices of the rest.

    If items are few, own slices take the whole line, and all items have equally many of them unless
    too many CTAs would idle. No slice is shorter than `CostModel.least_slice`, except a single one.
    """
    least, total = line.model.least_slice, line.total
    if 2 * len(line.tile) <= ctas:
        slices = max(1, min(ctas, total // least))
        fitting = fitting_slices(len(line.tile), slices)
        own = fitting if (slices - fitting) * PER_IDLE_OF_FEW <= slices else slices
        return Cuts.equal(own, total, 0)
    rest = total // PER_SHARED_PREFILL
    shared = min(ctas, rest // least) if active > 1 else 0
    end = total - rest if shared else total
    own = max(1, min(ctas, end // least))
    return Cuts.equal(own, end, shared)


def _exceeds_cache(tiles: Tiles, problem: Problem) -> bool:
    """Whether all heads, with one tile per segment, read more keys than the cache holds."""
    assert problem.prices is not None
    if problem.prices.cached_keys is None:
        return False
    is_first = np.append(True, tiles.segment[1:] != tiles.segment[:-1])
    keys = int(tiles.visible[is_first].sum()) * problem.keys * problem.num_kv_heads
    return keys > problem.prices.cached_keys


def _least_cut(line: Line, problem: Problem, ctas: int) -> int:
    """Key tiles of the shortest prefill that is cut; see `RolePrices.shortest_cut`."""
    assert problem.prices is not None
    least = problem.prices.cut_tiles(problem.keys)
    return min(least, line.total // (line.model.per_tile * ctas) + -(-least // LATE))


def whole_lists(items: int, ctas: int, active: int) -> tuple[int, int]:
    """Items per list of whole prefills, and number of lists: as many as a plan has room for.

    Args:
        items: items of the line.
        ctas: CTAs that prefill.
        active: CTAs that may claim prefills, once they have no decodes left.
    """
    each = -(-items // (ctas + (PREFILL_SLICES - 1) * active))
    return each, -(-items // each)


class Rounds(NamedTuple):
    """Rounds of lists of whole prefills.

    Attributes:
        each: items of a list.
        lists: 0, or at least one for each prefilling CTA, and at most `ROUNDS` rounds. The first
            round has a list for each prefilling CTA, the others for each CTA that may claim.
        are_all: there are lists, and the last round was not left out.
    """

    each: int
    lists: int
    are_all: bool


NO_ROUNDS = Rounds(0, 0, are_all=False)


def rounds_of(items: int, ctas: int, active: int) -> Rounds:
    """Lists of whole prefills; the rest is cut, so that all CTAs finish at about the same time.

    An incomplete last round is left out, too, if the items behind it do not make up for the lists
    it lacks. Here a round has one list per prefilling CTA, though other CTAs claim some, too.

    Args:
        items: items of the line.
        ctas: CTAs that prefill.
        active: CTAs that may claim prefills, once they have no decodes left.
    """
    # Behind these lists stays half an item per active CTA: a CTA waits for half of one on average.
    most = items - max(-(-items // PER_SHARED_PREFILL), -(-active // 2))
    if most < ctas:
        return NO_ROUNDS
    each = -(-most // (ctas + (ROUNDS - 1) * active))
    lists = most // each
    are_all = -(-lists // ctas) * ctas * each <= items
    return Rounds(each, lists if are_all else lists // ctas * ctas, are_all)


def _decode_lists(tiles: Tiles, problem: Problem, ctas: int, are_shared: bool) -> RoleLists:
    """Lists of decodes on `ctas` CTAs, and shared ones of the most lengths worth claiming.

    Args:
        tiles: at least one.
        problem: the decode part of the problem.
        ctas: CTAs that decode.
        are_shared: CTAs may claim lists; else the lines are cut as in a plan of decodes alone.
    """
    assert problem.prices is not None  # checked with the roles
    grid = Grid.of(ctas, problem.num_kv_heads)
    if are_shared:
        line = Line.of(tiles, grid.heads, problem.cost_model)
        rest = line.total // PER_SHARED_DECODE
        least = grid.slices * problem.prices.least_claim(line.model, problem.keys)
        for lengths in range(ENDS, 1, -1):
            if rest // shortest_in(lengths) >= least:
                cuts = Cuts.equal(grid.slices, line.total - rest, grid.slices, lengths)
                return cuts.lists(line, grid, tiles, problem)
    own = grid.lines * grid.slices
    return RoleLists(partition(tiles, problem, own), own, 0)


def _joined(prefills: Pieces, decodes: Pieces) -> tuple[Records, Records]:
    """ROLE_ITEM and MERGE records of both; slots of decodes come behind those of prefills."""
    items: Records = np.concatenate((prefills.items, decodes.items)).view(ROLE_ITEM.dtype)
    merges: Records = np.concatenate((prefills.merges, decodes.merges)).astype(MERGE.dtype)
    count, slots = len(prefills.items), int(prefills.merges["num_slots"].sum())
    is_cut = items["slot"][count:] >= 0
    items["slot"][count:] += is_cut * np.int32(slots)
    items["merge"][count:] += is_cut * np.int32(len(prefills.merges))
    merges["first_slot"][len(prefills.merges) :] += slots
    items["role"][count:] = 1
    return items, merges
