"""Checks invariants of every composed plan, from plan, page table and mask alone."""

from __future__ import annotations

import numpy as np

from warploom.errors import PlanInvalid
from warploom.scheduler.composed.plan import ComposedPlan
from warploom.scheduler.model.layout import ROW_CODE, Ints, Records
from warploom.scheduler.model.visibility import Visibility
from warploom.scheduler.plans.verify_lists import Checks, check_lists


def verify_composed(
    plan: ComposedPlan, requests: Records, visibility: Visibility, page_size: int
) -> None:
    """Checks that fused rows meet each visible key of their request once, and that results merge.

    Args:
        plan: the plan.
        requests: SEGMENT records of the batch, one for each request.
        visibility: the mask's answers for these segments.
        page_size: tokens of an entry of the block list.

    Raises:
        PlanInvalid: names the first invariant that does not hold.
    """
    for holds, reason in _invariants(plan, requests, visibility, page_size):
        if not np.all(holds):
            raise PlanInvalid(reason=reason)


def _invariants(
    plan: ComposedPlan, requests: Records, visibility: Visibility, page_size: int
) -> Checks:
    yield from _counts(plan)
    yield from _units(plan, requests)
    codes = plan.packed_rows.astype(np.int64)
    yield from _tiles(plan, codes // ROW_CODE, codes % ROW_CODE)
    item, unit, place = _entries(plan, codes // ROW_CODE, codes % ROW_CODE)
    yield from _keys(plan, requests, visibility, page_size, item, unit)
    yield from _joins(plan, item, unit, place)


def _counts(plan: ComposedPlan) -> Checks:
    problem = plan.problem
    header, items = plan.header[0], plan.items
    yield header["num_items"] == len(items), "the header miscounts the items"
    yield header["num_segments"] == len(plan.segments), "the header miscounts the parts"
    yield header["num_merges"] == len(plan.row_merges), "the header miscounts the row merges"
    yield from check_lists(plan)
    heads = problem.num_kv_heads
    yield len(plan.merges) == 0, "a composed plan has merges"
    yield items["merge"] == -1, "an item of a composed plan has a merge"
    yield (items["kv_head"] >= 0) & (items["kv_head"] < heads), "an item has no head"
    yield (items["segment"] >= 0) & (items["segment"] < len(plan.segments)), "an item has no part"


def _units(plan: ComposedPlan, requests: Records) -> Checks:
    """Units are the requests' fused rows, each once."""
    problem = plan.problem
    units, heads = plan.units, plan.units["num_heads"].astype(np.int64)
    yield heads > 0, "a unit has no heads"
    yield plan.unit_rows % heads == 0, "a unit has part of a query row"
    of = requests[units["batch"]]
    for field in ("q_len", "kv_len"):
        yield units[field] == of[field], f"a unit has another request's {field}"
    shift = of["kv_len"].astype(np.int64) - of["q_len"] + of["q_idx"] - of["q_row"]
    yield units["q_pos"] == units["q_row"] + shift, "a unit's rows are not at their positions"
    count = plan.unit_rows
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    unit = np.repeat(np.arange(len(units)), count)
    row = units["q_row"][unit].astype(np.int64) + within // heads[unit]
    head = units["first_head"][unit] + within % heads[unit]
    yield head < problem.group_size, "a unit has a head beyond its group"
    rows = [np.arange(r["q_row"], r["q_row"] + r["num_q"]) for r in requests]
    wanted = np.concatenate([np.zeros(0, np.int64), *rows])[:, None] * problem.group_size
    wanted = (wanted + np.arange(problem.group_size)).reshape(-1)
    found = np.sort(row * problem.group_size + head)
    yield np.array_equal(found, np.sort(wanted)), "units do not hold each fused row once"


def _tiles(plan: ComposedPlan, unit: Ints, within: Ints) -> Checks:
    """Tiles hold whole units and begin where a unit does."""
    first, rows = (plan.items[name].astype(np.int64) for name in ("row_begin", "rows"))
    yield (rows >= 1) & (rows <= plan.problem.rows), "an item has no rows, or more than a tile"
    yield (first >= 0) & (first + rows <= len(unit)), "an item's rows lie outside packed_rows"
    yield (unit >= 0) & (unit < len(plan.units)), "a row names no unit"
    yield within[first] == 0, "a tile begins within a unit"
    last = first + rows - 1
    yield within[last] == plan.unit_rows[unit[last]] - 1, "a tile ends within a unit"
    follows = (unit[1:] == unit[:-1]) & (within[1:] == within[:-1] + 1)
    opens = (within[1:] == 0) & (within[:-1] == plan.unit_rows[unit[:-1]] - 1)
    yield follows | opens, "a unit's rows are not in order"


def _entries(plan: ComposedPlan, unit: Ints, within: Ints) -> tuple[Ints, Ints, Ints]:
    """For each item and each unit of its tile: item, unit, and the unit's first row in the tile."""
    first, rows = (plan.items[name].astype(np.int64) for name in ("row_begin", "rows"))
    item = np.repeat(np.arange(len(rows)), rows)
    place = np.arange(len(item)) - np.repeat(np.cumsum(rows) - rows, rows)
    row = first[item] + place
    opens = np.flatnonzero(within[row] == 0)
    return item[opens], unit[row[opens]], place[opens]


def _keys(
    plan: ComposedPlan,
    requests: Records,
    visibility: Visibility,
    page_size: int,
    item: Ints,
    unit: Ints,
) -> Checks:
    """Items of a unit and head walk keys of its request, each once, and all keys that it sees."""
    problem = plan.problem
    items = plan.items[item]
    part = plan.segments[items["segment"]]
    begin, end = (items[name].astype(np.int64) for name in ("kv_begin", "kv_end"))
    yield (begin >= 0) & (begin <= end) & (end <= part["kv_count"]), "keys outside of a part"
    keys = np.array([role.keys for role in problem.roles])[plan.role[item]]
    yield begin % keys == 0, "an item's keys do not begin at a tile"
    yield part["kv_pos"] % page_size == 0, "a part does not begin at a page"
    of = requests[plan.units["batch"][unit]]
    code = items["segment"].astype(np.int64) * len(requests) + plan.units["batch"][unit]
    for pair in np.unique(code).tolist():
        listed, own = plan.segments[pair // len(requests)], requests[pair % len(requests)]
        pages = np.arange(-(-int(listed["kv_count"]) // page_size))
        mine = own["index_begin"] + listed["kv_pos"] // page_size + pages
        same = plan.indices[mine] == plan.indices[listed["index_begin"] + pages]
        yield same, "a unit reads pages that its request does not list"
    low, high = begin + part["kv_pos"], end + part["kv_pos"]
    yield high <= of["kv_len"], "a unit reads keys behind its request's"
    target = unit * problem.num_kv_heads + items["kv_head"]
    order = np.lexsort((high, low, target))
    low, high, target, unit = low[order], high[order], target[order], unit[order]
    opens = np.append(True, target[1:] != target[:-1])[: len(target)]
    closes = np.append(opens[1:], True)[: len(target)]
    before = np.where(opens, 0, np.append(0, high[:-1])[: len(high)])
    yield opens | (low >= before), "two items of a unit share keys"
    yield (
        np.array_equal(target[opens], np.arange(len(plan.units) * problem.num_kv_heads)),
        "a unit has no item",
    )
    yield from _unseen(plan, requests, visibility, unit, before, low)
    last = np.flatnonzero(closes)
    ends = requests["kv_len"][plan.units["batch"][unit[last]]].astype(np.int64)
    yield from _unseen(plan, requests, visibility, unit[last], high[last], ends)


def _unseen(
    plan: ComposedPlan,
    requests: Records,
    visibility: Visibility,
    unit: Ints,
    begin: Ints,
    end: Ints,
) -> Checks:
    """No row of a unit sees a key in [begin, end)."""
    problem = plan.problem
    batch = plan.units["batch"][unit].astype(np.int64)
    first = plan.units["q_row"][unit].astype(np.int64) - requests["q_row"][batch]
    count = plan.unit_rows[unit] // plan.units["num_heads"][unit]
    rows = first * problem.group_size, (first + count) * problem.group_size
    low, high = visibility.kv_bounds(batch, *rows)
    begin, end = (
        np.clip(begin, low, np.maximum(low, high)),
        np.clip(end, low, np.maximum(low, high)),
    )
    yield (
        visibility.visible_tiles(batch, *rows, begin, np.maximum(begin, end), 1) == 0,
        "visible keys of a unit belong to no item",
    )


def _joins(plan: ComposedPlan, item: Ints, unit: Ints, place: Ints) -> Checks:
    """Contributions are the partial results of a unit and head, in ascending order of keys."""
    problem = plan.problem
    items = plan.items[item]
    slot = items["slot"].astype(np.int64)
    target = unit * problem.num_kv_heads + items["kv_head"]
    number = np.bincount(target)
    partial = slot >= 0
    yield partial | (number[target] == 1), "an item writes what must be merged"
    key = plan.segments["kv_pos"][items["segment"]].astype(np.int64) + items["kv_begin"]
    order = np.flatnonzero(partial)[np.lexsort((key[partial], target[partial]))]
    merged, counted = np.unique(target[partial], return_counts=True)
    first = np.cumsum(counted) - counted
    yield np.array_equal(plan.contributions, (slot + place)[order]), "contributions lie elsewhere"
    rows = plan.unit_rows[merged // problem.num_kv_heads]
    run = np.repeat(np.arange(len(merged)), rows)
    within = np.arange(len(run)) - np.repeat(np.cumsum(rows) - rows, rows)
    row_merges = plan.row_merges
    yield len(row_merges) == len(run), "rows with several results are not merged once each"
    code = merged[run] // problem.num_kv_heads * ROW_CODE + within
    yield row_merges["row"] == code, "a merge names another row"
    yield (
        row_merges["kv_head"] == merged[run] % problem.num_kv_heads,
        "a merge names another head",
    )
    yield row_merges["count"] == counted[run], "a merge miscounts its contributions"
    yield row_merges["first"] == first[run], "a merge reads another row's contributions"
    used = plan.items["slot"] >= 0
    rows = plan.items["rows"][used].astype(np.int64)
    first = plan.items["slot"][used].astype(np.int64)
    by_slot = np.argsort(first)
    yield first[by_slot] == np.cumsum(rows[by_slot]) - rows[by_slot], "partial rows overlap"
    yield rows.sum() == plan.num_slots, "the header miscounts the partial rows"
