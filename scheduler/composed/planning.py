"""Composed plans: parts of the keys, each with its own query tiles, in one work list.

Differences from an ordinary plan: rows of a tile may belong to several requests, so a tile lists
its rows one by one (`packed_rows`); and a unit's partial results come from several parts, each of
which may be cut, so row merges list the partial results of each row (`row_merges`). When the last
piece of a prefix is done, many rows become complete at once; so all CTAs merge them together, after
all items are done. Assigning and levelling are the same as in other plans, and plans of two roles
use `role_lists` as others do. A tile has the role with the fewest rows that holds it: a prefix that
many requests read is a prefill, a decode request's own part is a decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from warploom.errors import ArgumentError
from warploom.scheduler.composed.plan import ComposedPlan
from warploom.scheduler.composed.prefixes import PrefixForest
from warploom.scheduler.composed.sharing import Choice, choose_parts
from warploom.scheduler.composed.tiles import (
    PackedTiles,
    Pairs,
    Parts,
    Units,
    VisibilityOf,
    cut_units,
    make_pairs,
    pack,
)
from warploom.scheduler.model.cost import CostModel
from warploom.scheduler.model.layout import MERGE, ROW_CODE, ROW_MERGE, WORK_ITEM, Ints, Records
from warploom.scheduler.model.problem import Problem, WorkList, ranges_and_loads
from warploom.scheduler.model.roles import Role, role_of_rows
from warploom.scheduler.model.tiles import Tiles
from warploom.scheduler.partition.balance import Moves, deal_and_level
from warploom.scheduler.partition.ordering import longest_first
from warploom.scheduler.partition.role_lists import share_out
from warploom.scheduler.plans.plan import header_of

MAX_UNITS = 2**31 // ROW_CODE  # so that the last row's code fits int32


@dataclass(frozen=True)
class SharedBatch:
    """A batch whose requests share prefixes; caches its units and parts for each tile height.

    Attributes:
        requests: SEGMENT records of a paged batch, one for each request.
        forest: its shared prefixes.
        group_size: query heads of each key/value head.
        page_size: tokens of an entry of the block list.
        levels: most parts that a request may read, its own included.
    """

    requests: Records
    forest: PrefixForest
    group_size: int
    page_size: int
    levels: int
    _cut: dict[int, tuple[Units, Parts, tuple[Choice, ...]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def cut(self, rows: int) -> tuple[Units, Parts, tuple[Choice, ...]]:
        """Each request's own query tiles of `rows` rows, the parts, and the reasons for them."""
        if rows not in self._cut:
            units = cut_units(self.requests, self.group_size, rows)
            count = np.bincount(units.request, minlength=len(self.requests))
            fused = self.requests["num_q"].astype(np.int64) * self.group_size
            # A request that fits no tile together with the smallest one would read keys about as
            # often with others as alone, and would have to merge each row.
            forest = self.forest.without(fused + fused[fused > 0].min(initial=rows) > rows)
            kept, choices = choose_parts(forest, count, fused, rows, self.levels)
            parts = Parts.of(self.requests, forest, kept, self.page_size)
            self._cut[rows] = units, parts, choices
        return self._cut[rows]

    def reads(self, rows: int) -> tuple[int, int, int]:
        """What tiles of `rows` rows would do for each key/value head, without regard to the mask.

        Returns:
            Distinct keys that are read, keys that tiles walk (counted for every tile), and tiles.
        """
        units, parts, choices = self.cut(rows)
        count = np.bincount(units.request, minlength=len(self.requests))
        keys = parts.records["kv_count"].astype(np.int64)
        tiles = np.append(np.array([one.tiles for one in choices if one.kept], np.int64), count)
        read = min(int(keys[tiles > 0].sum()), self._distinct_keys)
        return read, int(keys @ tiles), int(tiles.sum())

    @cached_property
    def _distinct_keys(self) -> int:
        """Keys of all requests, shared ones once: the most that is read from memory."""
        sharers = self.forest.sum_over_requests(np.ones(len(self.requests), np.int64))
        again = (sharers - 1) * self.forest.length
        return int(self.requests["kv_len"].sum(dtype=np.int64) - again.sum())


@dataclass(frozen=True)
class _Packed:
    """The packed tiles of a batch, and the units, parts and pairs they were made of."""

    units: Units
    parts: Parts
    choices: tuple[Choice, ...]
    pairs: Pairs
    tiles: PackedTiles

    @classmethod
    def of(cls, batch: SharedBatch, roles: Sequence[Role], visibility_of: VisibilityOf) -> _Packed:
        units, parts, choices = batch.cut(roles[0].rows)
        if len(units.request) > MAX_UNITS:
            raise ArgumentError(name="qo_indptr", reason=f"gives more than {MAX_UNITS} query tiles")
        pairs = make_pairs(units, parts, batch.group_size, visibility_of)
        return cls(units, parts, choices, pairs, pack(units, parts, pairs, roles))


def tiles_of_roles(
    batch: SharedBatch, roles: Sequence[Role], visibility_of: VisibilityOf
) -> list[int]:
    """Key tiles that each role walks for one key/value head; a packed tile walks a prefix once.

    Args:
        batch: the batch.
        roles: the one with the most rows first.
        visibility_of: the mask's answers for given segments.
    """
    tiles = _Packed.of(batch, roles, visibility_of).tiles
    return [int(one.visible.sum()) for one in _by_role(tiles, roles)]


def make_composed_plan(
    batch: SharedBatch,
    problem: Problem,
    visibility_of: VisibilityOf,
    indices: npt.NDArray[np.int32],
) -> ComposedPlan:
    """Plans one batch whose requests share prefixes.

    Args:
        batch: what to plan.
        problem: the same batch without prefixes, and the machine; tiles of at most `ROW_CODE` rows.
        visibility_of: the mask's answers for given segments.
        indices: the page table of all requests; parts point into it.

    Raises:
        ArgumentError: the batch has more units than a row's code can name, or a tile more rows.
    """
    problem.check()
    problem = replace(problem, may_deal=False)  # prefills lie on a line
    assert problem.group_size == batch.group_size  # units of both are the same fused rows
    rows = problem.rows
    if not 1 <= rows <= ROW_CODE:
        raise ArgumentError(name="rows", reason=f"is {rows}; expected 1 to {ROW_CODE}")
    packed = _Packed.of(batch, problem.roles, visibility_of)
    units, parts = packed.units, packed.parts
    if problem.smaller:
        work, tile = _share_out(packed.tiles, problem)
    else:
        work, tile = _deal(packed.tiles, parts.num_shared, problem)
    items = work.items
    row_merges, contributions, slots = _merge_rows(items, tile, packed, problem.num_kv_heads)
    counts = len(items), len(parts.records), len(row_merges), slots, 0
    return ComposedPlan(
        header=header_of(counts, problem, work),
        cta_indptr=work.cta_indptr,
        items=items,
        segments=parts.records,
        merges=np.zeros(0, MERGE.dtype),
        indices=indices,
        loads=work.loads,
        problem=problem,
        units=units.records,
        unit_rows=units.rows,
        packed_rows=_packed_rows(packed.pairs, units),
        row_merges=row_merges,
        contributions=contributions,
        choices=packed.choices,
    )


def _packed_rows(pairs: Pairs, units: Units) -> npt.NDArray[np.int32]:
    """Code of each row of each tile, in order of pairs, of which tiles are runs."""
    rows = units.rows[pairs.unit]
    within = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows)
    return (np.repeat(pairs.unit, rows) * ROW_CODE + within).astype(np.int32)


def _first_row(tiles: PackedTiles) -> Ints:
    """(n,) first entry in `packed_rows` of each tile; distinct."""
    first: Ints = np.cumsum(tiles.rows) - tiles.rows
    return first


def _by_role(tiles: PackedTiles, roles: Sequence[Role]) -> list[Tiles]:
    """The tiles of each role, as `Tiles` whose key tiles all count as visible."""
    first_row, role = _first_row(tiles), role_of_rows(tiles.rows, roles)
    found = []
    for number, one in enumerate(roles):
        mine = np.flatnonzero(role == number)
        own, row = tiles.take(mine), first_row[mine]
        visible = -((own.kv_begin - own.kv_end) // one.keys)
        rows = row, row + own.rows
        found.append(Tiles(own.part, *rows, own.kv_begin, own.kv_end, visible))
    return found


def _share_out(tiles: PackedTiles, problem: Problem) -> tuple[WorkList, Ints]:
    """Lists of two roles, and the tile of each item."""
    of_prefill, of_decode = _by_role(tiles, problem.roles)
    work = share_out(of_prefill, of_decode, problem)
    items = work.items.view(WORK_ITEM.dtype)
    tile = np.searchsorted(_first_row(tiles), items["row_begin"])
    items["rows"] = tiles.rows[tile]  # replaces the role, which follows from the rows
    items["merge"] = -1
    return replace(work, items=items), tile


def _deal(tiles: PackedTiles, num_shared: int, problem: Problem) -> tuple[WorkList, Ints]:
    """Lists, and the tile of each item; what lies above the mean load is cut off and moved.

    Own parts are assigned first, prefixes after them, so that prefixes are cut and fill the rest.
    Every key tile between a tile's bounds counts as visible.
    """
    # Without `piece_keys`: with it, small batches took up to 1.28 times as long (H200).
    model = CostModel.of(problem.rows, problem.keys)
    span = -((tiles.kv_begin - tiles.kv_end) // problem.keys)
    cost = model.of_chunks(span)
    mean = -(-int(cost.sum()) * problem.num_kv_heads // problem.active_ctas)
    shared = np.searchsorted(tiles.part, num_shared)  # tiles are ordered by part, prefixes first
    first = longest_first(cost[shared:], tiles.part[shared:], mean, problem.num_kv_heads)
    then = longest_first(cost[:shared], tiles.part[:shared], mean, problem.num_kv_heads)
    tile, head = np.concatenate(((first[0] + shared, first[1]), then), axis=1)
    cost, span = cost[tile], span[tile]
    cta, last, moves = deal_and_level(cost, span, mean, problem.active_ctas, model)
    items = _whole_items(tiles, tile, head)
    if moves is not None:
        owner = last[moves.owner]
        pieces = _cut(items, owner, moves, problem.keys)
        items, tile = np.concatenate((items, pieces)), np.append(tile, tile[owner])
        cta, span = moves.join(cta, span, owner)
        cost = model.of_chunks(span)
    order = np.lexsort((-cost, items["segment"] >= num_shared, cta))
    indptr, loads = ranges_and_loads(cta, cost, problem.num_ctas)
    return WorkList(indptr, items[order], np.zeros(0, MERGE.dtype), loads), tile[order]


def _whole_items(tiles: PackedTiles, tile: Ints, head: Ints) -> Records:
    """An item for each of these tiles and key/value heads."""
    items = np.zeros(len(tile), WORK_ITEM.dtype)
    for name, values in (
        ("segment", tiles.part),
        ("row_begin", _first_row(tiles)),
        ("kv_begin", tiles.kv_begin),
        ("kv_end", tiles.kv_end),
        ("rows", tiles.rows),
    ):
        items[name] = values[tile]
    items["kv_head"] = head
    items["slot"] = items["merge"] = -1
    return items


def _cut(items: Records, owner: Ints, moves: Moves, keys: int) -> Records:
    """Items of the pieces in `moves`; shortens the owners' items to end where the pieces begin."""
    pieces = items[owner]
    first = items["kv_begin"][owner].astype(np.int64)
    pieces["kv_begin"] = first + moves.begin * keys
    pieces["kv_end"] = np.minimum(first + moves.end * keys, pieces["kv_end"])
    items["kv_end"][owner[moves.opens]] = pieces["kv_begin"][moves.opens]
    return pieces


def _merge_rows(
    items: Records, tile: Ints, packed: _Packed, heads: int
) -> tuple[Records, npt.NDArray[np.int32], int]:
    """Gives partial rows to items whose units have several results, and lists them for row merges.

    An item whose units have no other result keeps slot -1: it writes the output itself.

    Returns:
        ROW_MERGE records, contributions, and partial rows in use.
    """
    tiles, pairs, units, parts = packed.tiles, packed.pairs, packed.units, packed.parts
    count = (tiles.end_pair - tiles.first_pair)[tile]
    item = np.repeat(np.arange(len(items)), count)
    pair = tiles.first_pair[tile[item]] + np.arange(len(item)) - (np.cumsum(count) - count)[item]
    target = pairs.unit[pair] * heads + items["kv_head"][item]
    number = np.bincount(target, minlength=len(units.request) * heads)
    partial = np.bincount(item, number[target] > 1, len(items)) > 0
    rows = items["rows"].astype(np.int64) * partial
    items["slot"] = np.where(partial, np.cumsum(rows) - rows, -1)
    # In order of units and heads, then of keys; results written directly are not merged.
    listed = np.flatnonzero(partial[item])
    item, pair, target = item[listed], pair[listed], target[listed]
    key = parts.records["kv_pos"][items["segment"][item]].astype(np.int64) + items["kv_begin"][item]
    order = np.lexsort((key, target))
    first_row = np.cumsum(units.rows[pairs.unit]) - units.rows[pairs.unit]
    place = items["slot"][item] + first_row[pair] - items["row_begin"][item]
    number = np.bincount(target, minlength=len(number))
    return _joins(number, units, heads), place[order].astype(np.int32), int(rows.sum())


def _joins(number: Ints, units: Units, heads: int) -> Records:
    """ROW_MERGE records, one for each row of each unit and head that has contributions."""
    target = np.flatnonzero(number)
    rows = units.rows[target // heads]
    within = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows)
    target = np.repeat(target, rows)
    row_merges = np.zeros(len(target), ROW_MERGE.dtype)
    row_merges["first"] = (np.cumsum(number) - number)[target]
    row_merges["count"] = number[target]
    row_merges["row"] = target // heads * ROW_CODE + within
    row_merges["kv_head"] = target % heads
    return row_merges
