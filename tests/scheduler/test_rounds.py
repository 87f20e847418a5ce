"""Prefills that read more keys than the cache holds are claimed in rounds (decision 0055)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mixed_plans import DECODE, PRICES, busy
from support.problems import plan_of

from warploom.scheduler.model.constants import (
    DECODE_SLICES,
    ENDS,
    PER_SHARED_PREFILL,
    PREFILL_SLICES,
    ROUNDS,
)
from warploom.scheduler.model.layout import (
    ROLE_LISTS,
    ROLE_OF_LISTS,
    SHARED_DECODES,
    SHARED_PREFILLS,
)
from warploom.scheduler.model.visibility import AllVisible
from warploom.scheduler.partition.role_lists import rounds_of, whole_lists
from warploom.scheduler.plans.verify import verify


def test_groups_of_lists_have_room_for_all_slices() -> None:
    """Own prefills and own decodes come first, then the slices that CTAs share."""
    assert SHARED_DECODES - SHARED_PREFILLS == PREFILL_SLICES - 1
    assert ROLE_LISTS - SHARED_DECODES == DECODE_SLICES - 1
    assert ROLE_OF_LISTS[:SHARED_PREFILLS] == (0, 1)
    assert not any(ROLE_OF_LISTS[SHARED_PREFILLS:SHARED_DECODES])
    assert all(ROLE_OF_LISTS[SHARED_DECODES:])


@pytest.mark.parametrize("limit", [None, 40, 13])
def test_prefills_beyond_the_cache_are_whole_and_in_the_order_of_the_line(
    kit: Any, limit: int | None
) -> None:
    """CTAs that take the lists of a round at the same time then read the keys of few heads."""
    case = busy(kit, limit)
    assert case.prices.cached_keys is None
    beyond = replace(case.prices, cached_keys=2 * 5000)  # the chunk sees 5,888 keys of two heads
    held = replace(case.prices, cached_keys=2 * 6100)
    plan, other = case.plan(prices=beyond), case.plan(prices=held)
    assert np.array_equal(other.items, case.plan().items)
    (prefill, _), ctas = plan.work_of_roles(), plan.problem.num_ctas
    each, lists, _ = rounds_of(-(-700 * 4 // 48) * 2, prefill.ctas, plan.problem.active_ctas)
    assert lists >= prefill.ctas and prefill.shared > lists - prefill.ctas
    own = [*range(plan.problem.active_ctas - prefill.ctas, plan.problem.active_ctas)]
    shared = [SHARED_PREFILLS * ctas + s for s in range(lists - prefill.ctas)]
    items = [plan.items[slice(*plan.cta_indptr[n : n + 2])] for n in (*own, *shared)]
    assert {len(found) for found in items} == {each}
    found = np.concatenate(items)
    assert (found["slot"] < 0).all() and len(found) == each * lists
    line = found["kv_head"] * 10**6 - found["row_begin"]  # the last rows are first
    assert (np.diff(line) > 0).all()
    assert plan.balance < 1.15
    verify(plan, case.visibility)


@pytest.mark.parametrize("cached", [None, 2 * 47 * 128, 2 * 47 * 128 - 1])
@pytest.mark.parametrize("limit", [None, 40, 13])
def test_short_prefills_are_claimed_whole(kit: Any, limit: int | None, cached: int | None) -> None:
    """Query tiles of the chunk see 47 key tiles of 128 at most, as the first one does."""
    case, longest = busy(kit, limit), 47 * 128
    case = replace(case, prices=replace(case.prices, cached_keys=cached))
    cut = case.plan(prices=replace(case.prices, shortest_cut=longest))
    plan = case.plan(prices=replace(case.prices, shortest_cut=longest + 1))
    assert (cut.items["slot"][cut.role == 0] >= 0).any()
    prefill, _ = plan.work_of_roles()
    first, shared = plan.problem.active_ctas - prefill.ctas, SHARED_PREFILLS * plan.problem.num_ctas
    lists = [*range(first, plan.problem.active_ctas), *range(shared, shared + prefill.shared)]
    found = [plan.items[slice(*plan.cta_indptr[n : n + 2])] for n in lists]
    items, whole = np.concatenate(found), -(-700 * 4 // 48) * 2
    assert len(items) == prefill.items == whole and (items["slot"] < 0).all()
    room = prefill.ctas + (PREFILL_SLICES - 1) * plan.problem.active_ctas
    assert {len(own) for own in found[:-1]} == {-(-whole // room)}
    by_tile, by_head = (1, 10**3) if cached in (None, 2 * longest) else (10**6, 1)
    line = items["kv_head"] * by_tile - items["row_begin"].astype(int) * by_head
    assert (np.diff(line) > 0).all()  # the last rows are first
    verify(plan, case.visibility)


@pytest.mark.parametrize(("heads", "is_cut"), [(1, True), (6, True), (8, False), (40, False)])
def test_fewer_short_prefills_than_ctas_are_cut_where_one_is_late(
    kit: Any, heads: int, is_cut: bool
) -> None:
    """One tile of each head sees 31 key tiles, which 8 CTAs would share."""
    segments = kit.make_segments([48], [31 * 128])
    plan = plan_of(
        segments, visibility=AllVisible(segments), rows=48, keys=128, smaller=(DECODE,),
        group_size=1, num_kv_heads=heads, num_ctas=8, prices=PRICES, may_deal=False,
    )  # fmt: skip
    assert (plan.items["slot"] >= 0).any() == is_cut
    if is_cut:
        assert plan.loads.max() < 2 * plan.loads.sum() / 8
    verify(plan, AllVisible(segments))


@given(items=st.integers(0, 3000), ctas=st.integers(1, 200), others=st.integers(0, 200))
def test_rounds_leave_an_eighth_and_make_up_for_the_last(
    items: int, ctas: int, others: int
) -> None:
    each, lists, are_all = rounds_of(items, ctas, ctas + others)
    left = items - each * lists
    assert are_all <= (lists > 0)
    if not lists:
        least = max(items / PER_SHARED_PREFILL, (ctas + others) / 2)
        assert items - least < ctas
        return
    assert ctas <= lists <= ctas + (ROUNDS - 1) * (ctas + others)
    assert lists + ENDS * ctas <= ctas + (PREFILL_SLICES - 1) * (ctas + others)  # a plan has room
    assert left * PER_SHARED_PREFILL >= items and 2 * left >= ctas + others
    assert left >= -lists % ctas * each  # who finds no list finds this
    assert are_all or lists % ctas == 0


@given(items=st.integers(1, 10**6), ctas=st.integers(1, 200), others=st.integers(0, 200))
def test_lists_of_whole_prefills_have_room_and_hold_all(items: int, ctas: int, others: int) -> None:
    room = ctas + (PREFILL_SLICES - 1) * (ctas + others)
    each, lists = whole_lists(items, ctas, ctas + others)
    assert lists <= room and each * (lists - 1) < items <= each * lists
    assert each == 1 or (each - 1) * room < items  # no list is longer than room demands
