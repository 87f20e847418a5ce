"""Checks invariants of every plan, from the plan and the mask alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from warploom.errors import PlanInvalid
from warploom.scheduler.model.layout import Ints
from warploom.scheduler.model.roles import most_cuts, roles_of
from warploom.scheduler.model.visibility import Visibility, visible_tiles
from warploom.scheduler.plans.plan import Plan
from warploom.scheduler.plans.verify_lists import Checks, Flags, check_lists


def verify(plan: Plan, visibility: Visibility) -> None:
    """Checks that each fused row meets each visible key once, and that partial results are merged.

    Args:
        plan: the plan.
        visibility: the mask's answers for the plan's segments.

    Raises:
        PlanInvalid: names the first invariant that does not hold.
    """
    work = _Work.of(plan)
    for holds, reason in _invariants(plan, work, visibility):
        if not np.all(holds):
            where = f" (item {int(np.argmin(holds))} of {np.size(holds)})" if np.ndim(holds) else ""
            raise PlanInvalid(reason=reason + where)


@dataclass(frozen=True)
class _Work:
    """The plan's items sorted by tile, then keys; shape (n,) each, but for `tiles`.

    Built before anything is checked, so it must not fail on invalid values.
    """

    tiles: Ints  # query tiles of each segment, for one head
    tile: Ints
    role: Ints  # clipped to existing roles
    rows: Ints  # rows of its role's tile
    keys: Ints
    segment: Ints
    row_begin: Ints
    kv_begin: Ints
    kv_end: Ints
    slot: Ints
    merge: Ints

    @classmethod
    def of(cls, plan: Plan) -> _Work:
        problem = plan.problem
        field = {name: plan.items[name].astype(np.int64) for name in plan.items.dtype.names or ()}
        fused = plan.segments["num_q"].astype(np.int64) * problem.group_size
        sizes = np.array([(role.rows, role.keys) for role in problem.roles], np.int64)
        of_segments = roles_of(plan.segments, problem.group_size, problem.roles)
        tiles = -(-fused // sizes[of_segments, 0])
        role = np.clip(plan.role, 0, len(sizes) - 1)
        rows, keys = sizes[role].T
        known = np.clip(field["segment"], 0, max(len(tiles) - 1, 0))
        first = np.append(0, np.cumsum(tiles))[known] * problem.num_kv_heads
        own = tiles[known] if len(tiles) else known
        tile = first + field["kv_head"] * own + field["row_begin"] // rows
        order = np.lexsort((field["kv_end"], field["kv_begin"], tile))
        names = "segment", "row_begin", "kv_begin", "kv_end", "slot", "merge"
        of_items = tile, role, rows, keys, *(field[name] for name in names)
        return cls(tiles, *(values[order] for values in of_items))

    @property
    def opens(self) -> Flags:
        """True for the first item of a tile."""
        return np.append(True, np.diff(self.tile) != 0)[: len(self.tile)]

    @property
    def closes(self) -> Flags:
        """True for the last item of a tile."""
        return np.append(self.opens[1:], True)[: len(self.tile)]

    @property
    def before(self) -> Ints:
        """End of the preceding item's keys."""
        return np.append(0, self.kv_end[:-1])[: len(self.tile)]

    @property
    def empty(self) -> Flags:
        """True for an item without keys."""
        return np.equal(self.kv_begin, self.kv_end)


def _invariants(plan: Plan, work: _Work, visibility: Visibility) -> Checks:
    yield from _counts(plan)
    yield from _ranges(plan, work)
    yield from _disjoint(plan, work)
    yield from _complete(plan, work, visibility)
    yield from _splits(plan, work)
    yield from _partials(plan, work)


def _counts(plan: Plan) -> Checks:
    header = plan.header[0]
    yield len(plan.header) == 1, "there is not exactly one header"
    yield header["num_items"] == len(plan.items), "the header miscounts the items"
    yield header["num_segments"] == len(plan.segments), "the header miscounts the segments"
    yield header["num_merges"] == len(plan.merges), "the header miscounts the merges"
    used = plan.merges["num_slots"].sum(dtype=np.int64)
    yield header["num_slots"] == used, "the header miscounts the slots"
    yield from check_lists(plan)


def _ranges(plan: Plan, work: _Work) -> Checks:
    problem = plan.problem
    items, segments = plan.items, plan.segments
    if problem.smaller:
        yield (plan.role >= 0) & (plan.role < len(problem.roles)), "an item has no role"
    else:
        yield items["rows"] == 0, "an item names its rows, as those of composed plans do"
    yield (items["segment"] >= 0) & (items["segment"] < len(segments)), "an item has no segment"
    heads = problem.num_kv_heads
    yield (items["kv_head"] >= 0) & (items["kv_head"] < heads), "an item has no head"
    wanted = roles_of(segments, problem.group_size, problem.roles)[items["segment"]]
    yield plan.role == wanted, "an item's rows are those of another role"
    rows, keys = np.array([(role.rows, role.keys) for role in problem.roles])[plan.role].T
    yield items["row_begin"] % rows == 0, "an item's rows do not begin at a tile"
    last = segments["num_q"][items["segment"]].astype(np.int64) * problem.group_size
    yield (items["row_begin"] >= 0) & (items["row_begin"] < last), "an item has no rows"
    count = segments["kv_count"][items["segment"]]
    inside = (items["kv_begin"] >= 0) & (items["kv_end"] <= count)
    yield inside, "an item's keys lie outside its segment's list"
    yield items["kv_begin"] <= items["kv_end"], "an item's keys end before they begin"
    yield items["kv_begin"] % keys == 0, "an item's keys do not begin at a tile"


def _disjoint(plan: Plan, work: _Work) -> Checks:
    tiles = int(work.tiles.sum()) * plan.problem.num_kv_heads
    present = np.bincount(work.tile, minlength=tiles)
    yield present > 0, "a query tile has no item: its rows are never written"
    yield work.opens | (work.kv_begin >= work.before), "two items of a tile share keys"
    aligned = work.closes | (work.kv_end % work.keys == 0)
    yield aligned, "an item that is not its tile's last ends within a key tile"
    alone = work.opens & work.closes
    yield ~work.empty | alone, "an item without keys is not its tile's only one"


def _complete(plan: Plan, work: _Work, visibility: Visibility) -> Checks:
    last_row = plan.segments["num_q"][work.segment].astype(np.int64) * plan.problem.group_size
    row_end = np.minimum(work.row_begin + work.rows, last_row)
    low, high = visibility.kv_bounds(work.segment, work.row_begin, row_end)
    low = np.maximum(low // work.keys * work.keys, 0)
    high = np.maximum(low, np.minimum(high, plan.segments["kv_count"][work.segment]))

    def unseen(begin: Ints, end: Ints) -> Flags:
        begin, end = np.clip(begin, low, high), np.clip(end, low, high)
        where = work.segment, work.row_begin, row_end, begin, np.maximum(begin, end)
        count = visible_tiles(visibility, plan.problem.roles, work.role, where)
        return np.equal(count, 0)

    yield ~work.empty | unseen(low, high), "an item without keys stands for visible ones"
    # Gaps between consecutive items, before the first item and after the last one.
    gap_begin = np.where(work.opens, low, work.before)
    gap_end = np.where(work.empty, low, work.kv_begin)
    yield unseen(gap_begin, gap_end), "visible keys before an item belong to no item"
    gap_begin = np.where(work.closes & ~work.empty, work.kv_end, high)
    yield unseen(gap_begin, high), "visible keys after a tile's last item belong to no item"


def _splits(plan: Plan, work: _Work) -> Checks:
    """Tiles are cut exactly at multiples of a size, so that bits depend on the request alone."""
    if plan.problem.split_size is None:
        return
    size = -(-plan.problem.split_size // work.keys) * work.keys  # rounded up to the role's key tile
    chunk = work.kv_begin // size
    yield ((work.kv_end - 1) // size == chunk) | work.empty, "an item crosses a fixed split"
    new = np.append(True, np.diff(chunk) != 0)[: len(chunk)]
    yield work.opens | new, "a tile is cut beside fixed splits"


def _partials(plan: Plan, work: _Work) -> Checks:
    problem = plan.problem
    opens = work.opens
    run = np.cumsum(opens) - 1
    parts = np.bincount(run, minlength=1)[run]
    alone = parts == 1
    yield ~alone | ((work.slot == -1) & (work.merge == -1)), "a whole tile has a slot or merge"
    known = (work.merge >= 0) & (work.merge < len(plan.merges))
    yield alone | known, "a part of a tile has no merge"
    merge = work.merge[~alone]
    place = (np.arange(len(run)) - np.flatnonzero(opens)[run])[~alone]
    yield plan.merges["num_slots"][merge] == parts[~alone], "a merge miscounts its parts"
    wanted = plan.merges["first_slot"][merge].astype(np.int64) + place
    yield work.slot[~alone] == wanted, "slots of a tile do not ascend with its keys"
    yield (work.slot[~alone] >= 0) & (work.slot[~alone] < plan.num_slots), "a slot is out of range"
    yield len(np.unique(work.slot[~alone])) == len(merge), "two items share a slot"
    split_tiles = np.count_nonzero(opens & ~alone)  # tiles share no slot, hence no merge
    yield split_tiles == len(plan.merges), "a merge has no tile"
    if problem.split_size is None:
        bound = 2 * most_cuts(problem.active_ctas, len(problem.roles))
        yield plan.num_slots <= bound, "more than two partial slots per boundary between lists"
    partial = plan.items["slot"] >= 0
    number = np.searchsorted(plan.cta_indptr, np.arange(len(partial)), side="right")
    late = partial[1:] & ~partial[:-1] & (number[1:] == number[:-1])
    yield ~late, "a partial item comes after a whole one"
