"""Checks plans before they run, for `WARPLOOM_VERIFY_PLANS=1`.

Three things are checked: the plan itself, by `scheduler.plans.verify`; that it fits the sizes that
memory was laid out for; and that memory holds it, byte for byte, where kernels read it. All checks
are array arithmetic over the plan's records, so they take about as long as NumPy takes to plan.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from warploom.dsl.types.formats import KVFormat
from warploom.errors import CapacityExceeded, PlanInvalid, WarploomError
from warploom.runtime.formats import make_batch
from warploom.runtime.planning.plan_status import GOOD, REASONS
from warploom.scheduler.model.layout import HEADER, OPENING, Records
from warploom.scheduler.model.visibility import Visibility
from warploom.scheduler.plans.capacity import Capacity
from warploom.scheduler.plans.plan import Plan
from warploom.scheduler.plans.unpack import unpack_batch
from warploom.scheduler.plans.verify import verify

SHOWN = 1000  # most lengths in a report
Check = Callable[[Plan, Visibility], None]


def verify_planned(
    plan: Plan,
    visibility: Visibility,
    room: Capacity,
    packed: npt.NDArray[np.int32],
    by: str,
    check: Check = verify,
) -> None:
    """Check one plan, as it was made and as it lies in memory.

    Args:
        plan: the plan.
        visibility: the mask's answers for it.
        room: layout of the memory.
        packed: int32 (room.total_ints,), the memory.
        by: name of the planner.
        check: checks the plan itself.

    Raises:
        PlanInvalid: says what is wrong, and describes the batch.
    """
    try:
        plan.check_fits(room)
        check(plan, visibility)
        _check_memory(plan, room, packed)
    except (PlanInvalid, CapacityExceeded) as error:
        reason = error.facts["reason"] if isinstance(error, PlanInvalid) else str(error)
        raise PlanInvalid(reason=f"{reason} ({described(plan, by)})") from None


def check_header(packed: npt.NDArray[np.int32], room: Capacity, by: str) -> None:
    """Check the counts by which a plan is read back.

    Args:
        packed: int32 (room.total_ints,), the plan.
        room: its layout.
        by: name of the planner.

    Raises:
        PlanInvalid: a section is longer than its room.
    """
    header = packed[: len(HEADER.fields)].view(HEADER.dtype)[0]
    for name in ("items", "segments", "merges", "slots"):
        count, most = int(header[f"num_{name}"]), int(getattr(room, f"max_{name}"))
        if not 0 <= count <= most:
            reason = f"the header counts {count} {name}, of {most} at most (planned by {by})"
            raise PlanInvalid(reason=reason)


def check_batch(plan: Plan, segments: Records, indices: npt.NDArray[np.int32], by: str) -> None:
    """Check that a plan belongs to the given batch.

    Args:
        plan: the plan.
        segments: SEGMENT records of the batch.
        indices: block list of the batch.
        by: name of the planner.

    Raises:
        PlanInvalid: it has other segments, or another block list.
    """
    same = np.array_equal(plan.segments, segments)
    reason = "" if same else "its segments are not the batch's"
    if same and not np.array_equal(plan.indices, indices[: len(plan.indices)]):
        reason = "its block list is not the batch's"
    if reason:
        raise PlanInvalid(reason=f"{reason} ({described(plan, by)})")


def holds_plan_of(
    given: tuple[torch.Tensor | None, ...],
    packed: npt.NDArray[np.int32],
    room: Capacity,
    kv_format: KVFormat,
) -> bool:
    """Whether memory of any content holds the plan of a batch, or the status of its refusal.

    Args:
        given: qo_indptr, kv_indptr, last_page_len and kv_indices.
        packed: int32 (room.total_ints,), the memory.
        room: its layout.
        kv_format: format of the batch.
    """
    header = packed[: len(HEADER.fields)].view(HEADER.dtype)[0]
    if 0 < header["status"] < len(REASONS):
        return int(header["num_items"]) == 0
    try:
        check_header(packed, room, "a replay")
        qo, kv, last, indices = given
        batch = make_batch(kv_format, qo, kv, indices, last)
    except WarploomError:
        return False
    segments, listed = unpack_batch(packed, room, kv_format.block_kv)
    same = header["status"] == GOOD and np.array_equal(segments, batch.segments)
    return bool(same) and np.array_equal(listed, batch.indices[: len(listed)])


def described(plan: Plan, by: str) -> str:
    """Describes a plan's batch and parameters, for a report."""
    problem = plan.problem
    lengths = (
        f"{name}={np.array2string(plan.segments[field], threshold=SHOWN, separator=',')}"
        for name, field in (("num_q", "num_q"), ("kv_count", "kv_count"), ("kv_len", "kv_len"))
    )
    tiles = " and ".join(f"{role.rows}x{role.keys}" for role in problem.roles)
    return (
        f"planned by {by} for {problem.num_kv_heads} key/value heads in groups of "
        f"{problem.group_size}, "
        f"tiles of {tiles}, {problem.active_ctas} of {problem.num_ctas} CTAs, "
        f"split_size={problem.split_size}, stream_k={problem.stream_k}, "
        f"may_deal={problem.may_deal}, piece_keys={problem.piece_keys}, prices={problem.prices}; "
        f"segments: {'; '.join(lengths)}"
    )


def _check_memory(plan: Plan, room: Capacity, packed: npt.NDArray[np.int32]) -> None:
    busy = plan.cta_indptr[1:] > plan.cta_indptr[:-1]
    for name, content in plan.sections().items():
        begin = room.offsets[name]
        both = packed[begin : begin + len(content)], content
        if name == "openings":  # the opening of an empty list is never read
            width = OPENING.itemsize // 4
            both = both[0].reshape(-1, width)[busy], both[1].reshape(-1, width)[busy]
        if not np.array_equal(*both):
            raise PlanInvalid(reason=f"memory does not hold its {name}")
