"""Plans of two roles, each cut at fixed multiples: a request's pieces do not depend on others."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mixed_plans import Mixed, busy, mixed
from support.problems import of_problem, plan_of

from warploom.errors import PlanInvalid
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.roles import Role, RolePrices
from warploom.scheduler.model.visibility import AllVisible
from warploom.scheduler.partition.fixed import ChunkCounts
from warploom.scheduler.plans.capacity import capacity
from warploom.scheduler.plans.plan import Plan
from warploom.scheduler.plans.unpack import unpack
from warploom.scheduler.plans.verify import verify

SPLITS = [1, 128, 200, 1000]


def pieces(plan: Plan, number: int) -> list[tuple[int, ...]]:
    """Head, role, first row, keys and place in the merge of each item of a segment."""
    found = []
    for item in plan.items[plan.items["segment"] == number]:
        part, parts = 0, 1
        if item["merge"] >= 0:
            merge = plan.merges[item["merge"]]
            part, parts = item["slot"] - merge["first_slot"], merge["num_slots"]
        names = "kv_head", "role", "row_begin", "kv_begin", "kv_end"
        found.append((*(int(item[name]) for name in names), int(part), int(parts)))
    return sorted(found)


def alone(case: Mixed, kit: Any, number: int, split: int, num_ctas: int) -> Plan:
    """A plan of one request of a batch."""
    one = case.segments[number : number + 1]
    segments = kit.make_segments(one["num_q"], one["kv_count"])
    group = case.numbers["group_size"]
    mask = AllVisible(segments) if case.left < 0 else kit.window(segments, group, case.left)
    numbers = {**case.numbers, "num_ctas": num_ctas, "split_size": split}
    return plan_of(segments, visibility=mask, prices=case.prices, **numbers)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), split=st.sampled_from(SPLITS), num_ctas=st.integers(1, 40))
def test_pieces_of_a_request_do_not_depend_on_neighbours_or_ctas(
    kit: Any, data: st.DataObject, split: int, num_ctas: int
) -> None:
    case = data.draw(mixed(kit))
    plan = case.plan(split_size=split)
    verify(plan, case.visibility)
    for number in range(len(case.segments)):
        own = alone(case, kit, number, split, num_ctas)
        assert pieces(plan, number) == pieces(own, 0)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), split=st.sampled_from(SPLITS))
def test_each_role_is_cut_at_multiples_of_its_own_size(
    kit: Any, data: st.DataObject, split: int
) -> None:
    case = replace(data.draw(mixed(kit)), left=-1)  # all keys of a request are seen
    plan = case.plan(split_size=split, visibility=AllVisible(case.segments))
    keys = [role.keys for role in plan.problem.roles]
    group = case.numbers["group_size"]
    for number, segment in enumerate(case.segments):
        role = int(segment["num_q"] * group <= plan.problem.roles[1].rows)
        count = int(segment["kv_count"])
        size = next(at for at in range(split, split + keys[role]) if at % keys[role] == 0)
        borders = [*range(0, count, size), count] if count else [0, 0]
        wanted = list(pairwise(borders))
        rows = range(0, int(segment["num_q"]) * group, plan.problem.roles[role].rows)
        expected = [
            (head, role, row, *span, part, len(wanted))
            for head in range(case.numbers["num_kv_heads"])
            for row in rows
            for part, span in enumerate(wanted)
        ]
        assert pieces(plan, number) == expected


@settings(max_examples=150, deadline=None)
@given(data=st.data(), split=st.sampled_from(SPLITS))
def test_every_batch_fits_its_bounds_and_its_own_pieces(
    kit: Any, data: st.DataObject, split: int
) -> None:
    case = data.draw(mixed(kit))
    plan = case.plan(split_size=split)
    least, spare = Bounds.of(case.segments), st.integers(0, 50)
    bounds = Bounds(
        least.max_requests + data.draw(spare),
        least.max_q_rows + data.draw(spare),
        least.max_kv_len + data.draw(spare),
    )
    of_batch = ChunkCounts.of(
        case.segments, plan.problem.roles, case.numbers["group_size"],
        case.numbers["num_kv_heads"], split,
    )  # fmt: skip
    for own in (None, of_batch):
        room = capacity(bounds, **case.numbers, split_size=split, chunks=own)
        again = unpack(plan.pack(room), room, plan.problem, plan.indices)
        for name in ("header", "cta_indptr", "items", "merges", "loads"):
            assert np.array_equal(getattr(again, name), getattr(plan, name)), name
    if case.left < 0:  # nothing is left out
        used = len(plan.items), len(plan.merges), plan.num_slots
        assert used == (of_batch.items, of_batch.merges, of_batch.slots)


@pytest.mark.parametrize("limit", [None, 40, 2])
@pytest.mark.parametrize("split", [1024, 2048])
def test_ctas_are_loaded_evenly_and_claim_what_is_late(
    kit: Any, limit: int | None, split: int
) -> None:
    case = replace(busy(kit, limit), prices=RolePrices((160, 30), 1000, 256))
    plan = case.plan(split_size=split)
    verify(plan, case.visibility)
    prefill, decode = plan.work_of_roles()
    active = limit or 64
    assert prefill.ctas + decode.ctas == plan.busy_ctas == active  # each has one role
    assert plan.header["num_decode_ctas"][0] == decode.ctas
    has = np.diff(plan.cta_indptr) > 0
    assert has[active - prefill.ctas : active].all() and has[64 : 64 + decode.ctas].all()
    assert prefill.shared > 0 and (decode.shared > 0) == (decode.ctas > 1)
    assert plan.balance < 1.15 if split == 1024 else plan.balance < 1.4


def test_few_chunks_leave_no_cta_without_work_that_others_have(kit: Any) -> None:
    """Prices ask for 63 CTAs that prefill, but there are four chunks."""
    segments = kit.make_segments([48, *[1] * 30], [4000, *[8000] * 30])
    case = replace(busy(kit), segments=segments, visibility=AllVisible(segments), left=-1)
    case.numbers.update(num_kv_heads=1, group_size=1)
    plan = case.plan(split_size=1024, prices=RolePrices((10**6, 1), 1000))
    assert [work.ctas for work in plan.work_of_roles()] == [4, 60]
    plan = case.plan(split_size=8192, prices=RolePrices((1, 10**6), 1000))
    assert [work.ctas for work in plan.work_of_roles()] == [1, 30]
    plan = case.plan(split_size=64, prices=RolePrices((10**6, 1), 1000))
    assert [work.ctas for work in plan.work_of_roles()] == [32, 32]


def test_one_cta_has_both_roles_and_shares_nothing(kit: Any) -> None:
    plan = busy(kit, 1).plan(split_size=1024)
    prefill, decode = plan.work_of_roles()
    assert (prefill.ctas, decode.ctas, prefill.shared, decode.shared) == (1, 1, 0, 0)
    assert len(plan.merges) > 0
    verify(plan, busy(kit).visibility)


@pytest.mark.parametrize("role", [0, 1])
def test_one_role_alone_has_all_ctas(kit: Any, role: int) -> None:
    segments = kit.make_segments([[700], [1] * 31][role], [[6000], [9000] * 31][role])
    mask = kit.window(segments, 4)
    plan = Mixed(segments, mask, 2**40, busy(kit).numbers, None).plan(split_size=1024)
    work = plan.work_of_roles()
    assert (work[role].ctas, work[1 - role].ctas, work[1 - role].items) == (64, 0, 0)
    assert (plan.num_shared_prefills > 0) == (role == 0) and plan.num_shared_decodes == 0
    verify(plan, mask)


def test_no_segments(kit: Any) -> None:
    segments = kit.make_segments([], [])
    case = replace(busy(kit), segments=segments, visibility=AllVisible(segments))
    plan = case.plan(split_size=1024)
    verify(plan, case.visibility)
    assert plan.busy_ctas == len(plan.items) == plan.num_shared_prefills == 0


@pytest.mark.parametrize("role", [0, 1])
def test_cuts_at_other_places_are_seen(kit: Any, role: int) -> None:
    """As if the plan had been made for other sizes: of one role only."""
    segments = kit.make_segments([500] if role == 0 else [1], [6000])
    mask = AllVisible(segments)
    case = replace(busy(kit), segments=segments, visibility=mask)
    case.numbers["smaller"] = (Role("decode", 12, 96),)
    plan = case.plan(split_size=2048)  # 2048 keys, and 2112
    verify(plan, mask)
    with pytest.raises(PlanInvalid, match="crosses a fixed split"):
        verify(of_problem(plan, split_size=1024), mask)
    with pytest.raises(PlanInvalid, match="cut beside fixed splits"):
        verify(of_problem(plan, split_size=3 * 2112), mask)
    verify(of_problem(plan, split_size=2048 - 20), mask)  # rounded up to the same
