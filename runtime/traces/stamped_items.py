"""Work items with their times: what a plan says of each, beside what the kernel told."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from warploom.scheduler.composed.plan import ComposedPlan
from warploom.scheduler.model.layout import ROW_CODE, Ints, Records
from warploom.scheduler.plans.plan import Plan

ITEM = np.dtype(
    [
        ("sm", np.int64),  # multiprocessor, or thread of the host
        ("cta", np.int64),  # that ran it; on the CPU, the list of the plan that it was taken from
        ("role", "U8"),  # prefill or decode, or single where all rows have one tile
        ("request", np.int64),  # whose rows; -1 where a tile of a composed plan has several's
        ("kv_head", np.int64),
        ("q_begin", np.int64),  # first query row, within the request; 0 of several
        ("q_end", np.int64),  # one past the last
        ("kv_begin", np.int64),  # first key, an index into the keys that the request lists
        ("kv_end", np.int64),  # one past the last
        ("is_partial", np.bool_),  # other items have the rest of the rows' keys
        ("begin_us", np.float64),  # microseconds since the first item began
        ("end_us", np.float64),
        ("cycles", np.int64),  # of the multiprocessor, from begin to end; 0 on the CPU
    ]
)
SINGLE = "single"  # the role of all items where there is one

_Rows: TypeAlias = tuple[Ints, Ints, Ints]  # request, first query row, one past the last


def stamped_items(plan: Plan, stamps: Records) -> Records:
    """ITEM records, one for each work item, in the order of the plan.

    Args:
        plan: as it ran.
        stamps: STAMP records of its items.
    """
    found = np.zeros(len(stamps), ITEM)
    if len(stamps) == 0:
        return found
    items, first = plan.items, stamps["begin"].min()
    begin = plan.segments["kv_pos"][items["segment"]].astype(np.int64)
    found["sm"], found["cta"] = stamps["sm"], stamps["cta"]
    names = [role.name for role in plan.problem.roles] if plan.problem.smaller else [SINGLE]
    found["role"] = np.array(names)[plan.role]
    rows = _composed_rows(plan) if isinstance(plan, ComposedPlan) else _rows(plan)
    found["request"], found["q_begin"], found["q_end"] = rows
    found["kv_head"] = items["kv_head"]
    found["kv_begin"], found["kv_end"] = begin + items["kv_begin"], begin + items["kv_end"]
    found["is_partial"] = items["slot"] >= 0
    found["begin_us"] = (stamps["begin"] - first) / 1e3
    found["end_us"] = (stamps["end"] - first) / 1e3
    found["cycles"] = stamps["end_cycle"] - stamps["begin_cycle"]
    return found


def _rows(plan: Plan) -> _Rows:
    """Rows of tiles that are cut out of one segment each."""
    segment, group = plan.segments[plan.items["segment"]], plan.problem.group_size
    rows = np.array([role.rows for role in plan.problem.roles], np.int64)[plan.role]
    first = plan.items["row_begin"].astype(np.int64)
    last = np.minimum(first + rows, segment["num_q"].astype(np.int64) * group)
    begin = segment["q_idx"].astype(np.int64)
    return segment["batch"].astype(np.int64), begin + first // group, begin + -(-last // group)


def _composed_rows(plan: ComposedPlan) -> _Rows:
    """Rows of tiles that list them."""
    first, rows = (plan.items[name].astype(np.int64) for name in ("row_begin", "rows"))
    opens = np.cumsum(rows) - rows
    entry = np.repeat(first - opens, rows) + np.arange(int(rows.sum()))
    unit, within = np.divmod(plan.packed_rows[entry].astype(np.int64), ROW_CODE)
    units = plan.units[unit]
    heads = units["num_heads"].astype(np.int64)
    row = units["q_pos"].astype(np.int64) - units["kv_len"] + units["q_len"] + within // heads
    request = _over(np.minimum, units["batch"].astype(np.int64), opens)
    is_one = request == _over(np.maximum, units["batch"].astype(np.int64), opens)
    count = _over(np.add, (within % heads == 0).astype(np.int64), opens)
    begin = np.where(is_one, _over(np.minimum, row, opens), 0)
    end = np.where(is_one, _over(np.maximum, row, opens) + 1, count)
    return np.where(is_one, request, -1), begin, end


def _over(function: np.ufunc, values: Ints, opens: Ints) -> Ints:
    """One value of each item, whose rows begin at `opens`."""
    found: npt.NDArray[np.int64] = function.reduceat(values, opens)
    return found
