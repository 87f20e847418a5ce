"""Reads a packed plan back, as a kernel reads it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from warploom.scheduler.model.layout import (
    HEADER,
    MERGE,
    ROLE_ITEM,
    SEGMENT,
    WORK_ITEM,
    Ints,
    Record,
    Records,
)
from warploom.scheduler.model.problem import Problem, WorkList
from warploom.scheduler.plans.capacity import Capacity
from warploom.scheduler.plans.plan import Plan


def unpack_batch(
    buffer: npt.NDArray[np.int32], capacity: Capacity, page_size: int
) -> tuple[Records, npt.NDArray[np.int32]]:
    """Segments and block list of a packed plan.

    Args:
        buffer: int32 (capacity.total_ints,).
        capacity: its layout.
        page_size: tokens of an entry of the block list; 0 if there is none.
    """
    segments = _records(buffer, capacity, "segments", SEGMENT)
    blocks = 0
    if page_size and len(segments):
        pages = -(-segments["kv_count"].astype(np.int64) // page_size)
        blocks = int((segments["index_begin"] + pages).max())
    return segments, buffer[capacity.offsets["indices"] :][:blocks].copy()


def unpack(
    buffer: npt.NDArray[np.int32],
    capacity: Capacity,
    problem: Problem,
    indices: npt.NDArray[np.int32],
) -> Plan:
    """The plan that was packed, by a native planner or by `Plan.pack`.

    Args:
        buffer: int32 (capacity.total_ints,).
        capacity: its layout.
        problem: what was planned, with the segments that `unpack_batch` gave.
        indices: the block list that `unpack_batch` gave.
    """
    begin = capacity.offsets["cta_indptr"]
    indptr = buffer[begin:][: capacity.num_lists + 1].copy()
    record = ROLE_ITEM if problem.smaller else WORK_ITEM
    header = _header(buffer, capacity.header)
    items = _records(buffer, capacity, "items", record)
    merges = _records(buffer, capacity, "merges", MERGE)
    work = WorkList(indptr, items, merges, _loads(problem, items, indptr))
    return replace(Plan.of(problem, work, indices), header=header)


def _header(buffer: npt.NDArray[np.int32], record: Record = HEADER) -> Records:
    header: Records = buffer[: len(record.fields)].copy().view(record.dtype)
    return header


def _records(
    buffer: npt.NDArray[np.int32], capacity: Capacity, name: str, record: Record
) -> Records:
    size = int(_header(buffer)[f"num_{name}"][0]) * len(record.fields)
    records: Records = buffer[capacity.offsets[name] :][:size].copy().view(record.dtype)
    return records


def _loads(problem: Problem, items: Records, indptr: npt.NDArray[np.int32]) -> Ints:
    if problem.prices is None:
        cost = _cost(problem, items)
    else:
        cost = np.zeros(len(items), np.int64)
        for number, part in enumerate(problem.by_role()):
            mine = np.flatnonzero(items["role"] == number)
            cost[mine] = problem.prices.units[number] * _cost(part, items[mine])
    total = np.append(0, np.cumsum(cost))
    loads: Ints = np.diff(total[indptr])
    return loads


def _cost(problem: Problem, records: Records) -> Ints:
    items = {name: records[name].astype(np.int64) for name in records.dtype.names or ()}
    segment, row = items["segment"], items["row_begin"]
    fused = problem.segments["num_q"].astype(np.int64) * problem.group_size
    row_end = np.minimum(row + problem.rows, fused[segment])
    keys = items["kv_begin"], items["kv_end"]
    visible = problem.visibility.visible_tiles(segment, row, row_end, *keys, problem.keys)
    return problem.cost_model.of_chunks(visible)
