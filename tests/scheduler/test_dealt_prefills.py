"""Prefills that are dealt: whole ones to CTAs, the longest first, and some left to be claimed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plan_text_roles
from support.mixed_plans import DEALT, DECODE, ON_A_LINE, Mixed
from support.problems import plan_of
from support.sampling import few

from warploom.scheduler.model.constants import FEWEST_DEALERS, MOST_DEALT_PER_CTA, SMALLEST_GROUP
from warploom.scheduler.model.layout import SHARED_PREFILLS
from warploom.scheduler.model.roles import RolePrices
from warploom.scheduler.model.visibility import AllVisible
from warploom.scheduler.partition import worklist
from warploom.scheduler.partition.dealt_prefills import are_dealt
from warploom.scheduler.partition.role_lists import rounds_of
from warploom.scheduler.plans.plan import Plan
from warploom.scheduler.plans.verify import verify

LONG = 6000  # keys, which are worth cutting
PRICES = RolePrices((1800, 60), 100, shortest_cut=4096)


def batch(
    kit: Any, chunks: list[tuple[int, int]], decodes: int, ctas: int, heads: int = 2, group: int = 4
) -> Mixed:
    """Chunks of so many rows over so many keys, and decodes over 9,000."""
    q_lens, kv_lens = [rows for rows, _ in chunks], [keys for _, keys in chunks]
    segments = kit.make_segments([*q_lens, *[1] * decodes], [*kv_lens, *[9000] * decodes])
    numbers = {
        "rows": 48, "keys": 128, "smaller": (DECODE,), "group_size": group,
        "num_kv_heads": heads, "num_ctas": ctas,
    }  # fmt: skip
    return Mixed(segments, AllVisible(segments), -1, numbers, None, PRICES, DEALT)


def pieces_of(plan: Plan) -> Any:
    """Prefills that are parts, but for the first of each tile."""
    slots = plan.items["slot"]
    return (plan.role == 0) & (slots >= 0) & ~np.isin(slots, plan.merges["first_slot"])


def shared_items(plan: Plan) -> list[Any]:
    begin = SHARED_PREFILLS * plan.problem.num_ctas
    ends = plan.cta_indptr[begin : begin + plan.num_shared_prefills + 1]
    return [plan.items[first:last] for first, last in pairwise(ends)]


@settings(max_examples=few(25, of=80), deadline=None)
@given(data=st.data())
def test_the_text_says_the_same(kit: Any, data: st.DataObject) -> None:
    draw = data.draw
    chunk = st.tuples(st.integers(1, 700), st.integers(700, 9000))
    case = batch(
        kit, draw(st.lists(chunk, min_size=1, max_size=3)), draw(st.sampled_from([0, 1, 5, 30])),
        draw(st.integers(2, 150)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 4, 12])),
    )  # fmt: skip
    problem = case.problem()
    fast, slow = worklist.build(problem), plan_text_roles.build(problem)
    for name in ("cta_indptr", "items", "merges", "loads", "num_shared_prefills"):
        assert np.array_equal(getattr(fast, name), getattr(slow, name)), name
    verify(case.plan(), case.visibility)


def test_pieces_are_left_to_be_claimed_beside_decodes(kit: Any) -> None:
    """60 tiles of each of two heads for fewer CTAs than that: some have two, and give parts."""
    plan = batch(kit, [(720, LONG)], 4, 100).plan()
    pieces, shared = pieces_of(plan), shared_items(plan)
    assert 0 < pieces.sum() == len(shared)
    assert all(len(items) == 1 for items in shared)
    keys = [int(one["kv_end"][0] - one["kv_begin"][0]) for one in shared]
    assert keys == sorted(keys, reverse=True)
    whole = (plan.role == 0) & (plan.items["slot"] < 0)
    assert whole.sum() + len(plan.merges) >= 2 * 60
    verify(plan, AllVisible(plan.segments))


def test_whole_ones_are_left_where_all_are_even(kit: Any) -> None:
    """160 tiles for 85 CTAs: those with two leave the second."""
    case = batch(kit, [(960, LONG)], 70, 100)
    plan = case.plan()
    assert not pieces_of(plan).any()
    prefill, _ = plan.work_of_roles()
    assert prefill.ctas == 85 >= FEWEST_DEALERS and prefill.shared == 160 - 85
    assert all(len(items) == 1 and items["slot"][0] < 0 for items in shared_items(plan))
    verify(plan, case.visibility)


def test_prefills_of_unknown_price_lie_on_a_line_beside_decodes(kit: Any) -> None:
    unknown = replace(PRICES, may_deal_beside_decodes=False)
    case = batch(kit, [(720, LONG)], 4, 100)
    plan, line = case.plan(prices=unknown), case.plan(**ON_A_LINE)
    assert np.array_equal(plan.items, line.items)
    assert not np.array_equal(plan.items, case.plan().items)
    alone = batch(kit, [(720, LONG)], 0, 100)
    assert np.array_equal(alone.plan(prices=unknown).items, alone.plan().items)


def test_nothing_is_claimed_without_decodes(kit: Any) -> None:
    case = batch(kit, [(720, LONG)], 0, 100)
    plan = case.plan()
    assert plan.num_shared_prefills == 0 and pieces_of(plan).any()
    assert plan.balance < case.plan(**ON_A_LINE).balance + 0.1
    verify(plan, case.visibility)


@pytest.mark.parametrize(
    ("items", "ctas", "group", "is_dealt"),
    [
        (1, FEWEST_DEALERS, SMALLEST_GROUP, True),
        (MOST_DEALT_PER_CTA * FEWEST_DEALERS, FEWEST_DEALERS, SMALLEST_GROUP, True),
        (MOST_DEALT_PER_CTA * FEWEST_DEALERS + 1, FEWEST_DEALERS, SMALLEST_GROUP, False),
        (FEWEST_DEALERS, FEWEST_DEALERS - 1, SMALLEST_GROUP, False),
        (FEWEST_DEALERS, FEWEST_DEALERS, SMALLEST_GROUP - 1, False),
    ],
)
def test_who_is_dealt_beside_decodes(items: int, ctas: int, group: int, is_dealt: bool) -> None:
    def dealt(are_short: bool, has_all_rounds: bool) -> bool:
        return are_dealt(items, ctas, group, are_short, has_all_rounds)

    assert dealt(False, True) is is_dealt
    assert dealt(False, False) is (ctas >= FEWEST_DEALERS and items <= MOST_DEALT_PER_CTA * ctas)
    assert not dealt(True, False)


@pytest.mark.parametrize(("tiles", "is_whole"), [(100, True), (85, False)])
@pytest.mark.parametrize("group", [1, 4])
def test_whole_rounds_are_dealt_if_heads_have_groups(
    kit: Any, group: int, tiles: int, is_whole: bool
) -> None:
    """Tiles of two heads, whose keys the cache does not hold: two rounds for 90 CTAs, or one."""
    case = batch(kit, [(48 * tiles // group, LONG)], 30, 100, group=group)
    prices = replace(case.prices, cached_keys=2 * LONG - 1)
    plan, line = case.plan(prices=prices), case.plan(prices=prices, **ON_A_LINE)
    prefill, _ = plan.work_of_roles()
    assert rounds_of(2 * tiles, prefill.ctas, 100).are_all is is_whole
    is_line = group == 1 and is_whole
    assert np.array_equal(plan.items, line.items) is is_line
    verify(plan, case.visibility)


def test_a_rest_that_is_shared_is_not_the_pieces_of_one(kit: Any) -> None:
    """Two tiles on a line: a shared eighth would be a quarter of one, in as many pieces as CTAs."""
    case = batch(kit, [(12, 60_000)], 4, 100, heads=2)
    plan = case.plan(**ON_A_LINE)
    prefill, _ = plan.work_of_roles()
    slots = plan.merges["num_slots"][:2]
    assert prefill.shared == 0 and prefill.ctas == slots.sum() and slots[0] == slots[1]
    verify(plan, case.visibility)


@pytest.mark.parametrize(("tiles", "used"), [(5, 130), (6, 132), (7, 126), (48, 132)])
def test_few_on_a_line_leave_few_ctas_idle(kit: Any, tiles: int, used: int) -> None:
    """Equal parts of each, unless an eighth of the CTAs had none: 48 would have two of 132 each."""
    segments = kit.make_segments([48 * tiles], [10 * LONG])
    plan = plan_of(
        segments, visibility=AllVisible(segments), rows=48, keys=128, smaller=(DECODE,),
        group_size=1, num_kv_heads=1, num_ctas=132, prices=PRICES, **ON_A_LINE,
    )  # fmt: skip
    prefill, _ = plan.work_of_roles()
    assert (prefill.ctas, prefill.shared) == (used, 0)
    assert plan.balance < 1.2
    verify(plan, AllVisible(segments))
