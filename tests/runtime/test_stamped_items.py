"""What a trace says of work items: together they are the batch, and times are those of stamps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import problems

import warploom as wl
from warploom.codegen.stamps import STAMP
from warploom.runtime.formats import make_batch
from warploom.runtime.traces.run_times import predicted
from warploom.runtime.traces.stamped_items import stamped_items
from warploom.scheduler.composed.planning import SharedBatch, make_composed_plan
from warploom.scheduler.composed.prefixes import find_prefixes
from warploom.scheduler.model.layout import Records
from warploom.scheduler.model.problem import Problem
from warploom.scheduler.model.roles import Role, RolePrices
from warploom.scheduler.model.visibility import AllVisible
from warploom.scheduler.plans.plan import Plan

PAGE = 4
PRICES = RolePrices((160, 30), 10)
LENGTHS = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 300)), min_size=1, max_size=5)


def indptr(lengths: list[int]) -> np.ndarray:
    return np.append(0, np.cumsum(lengths)).astype(np.int32)


def plan_of(requests: list[tuple[int, int]], group: int, two_roles: bool) -> Plan:
    q_lens, kv_lens = (list(x) for x in zip(*requests, strict=True))
    segments = make_batch(wl.Ragged(), indptr(q_lens), indptr(kv_lens)).segments
    roles = (Role("decode", 8, 32),) if two_roles else ()
    return problems.plan_of(
        segments, num_kv_heads=2, group_size=group, rows=16, keys=64, num_ctas=5,
        visibility=AllVisible(segments), smaller=roles, prices=PRICES if roles else None,
    )  # fmt: skip


def stamped(plan: Plan, seed: int = 0) -> Records:
    """Items of random times, 1 to 9 microseconds each, from a late hour on."""
    stamps = np.zeros(len(plan.items), STAMP)
    rng = np.random.default_rng(seed)
    stamps["begin"] = 10**18 + rng.integers(0, 1000, len(stamps))
    stamps["end"] = stamps["begin"] + rng.integers(1000, 9000, len(stamps))
    return stamped_items(plan, stamps)


@settings(max_examples=40)
@given(requests=LENGTHS, group=st.sampled_from([1, 2, 8]), two_roles=st.booleans())
def test_items_are_the_batch(requests: list[tuple[int, int]], group: int, two_roles: bool) -> None:
    """Tiles are whole query rows here: each row meets each key of its request once per head."""
    plan = plan_of(requests, group, two_roles)
    items = stamped(plan)
    met = {(r, head): np.zeros(size, int) for r, size in enumerate(requests) for head in (0, 1)}
    for item in items:
        rows, keys = slice(item["q_begin"], item["q_end"]), slice(item["kv_begin"], item["kv_end"])
        assert rows.stop <= requests[item["request"]][0]
        assert keys.stop <= requests[item["request"]][1]
        met[item["request"], item["kv_head"]][rows, keys] += 1
        few = requests[item["request"]][0] * group <= 8
        assert item["role"] == (("decode" if few else "prefill") if two_roles else "single")
    assert all((count == 1).all() for count in met.values())
    assert np.array_equal(items["is_partial"], plan.items["merge"] >= 0)


@settings(max_examples=30)
@example(requests=[(1, 290), (2, 270), (1, 300), (5, 260)], group=2, shared=60)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 2, 5, 40]), st.integers(0, 300)),
        min_size=1,
        max_size=8,
    ),
    group=st.sampled_from([1, 2]),
    shared=st.integers(0, 60),
)
def test_items_of_composed_plans_are_the_batch(
    requests: list[tuple[int, int]], group: int, shared: int
) -> None:
    """All requests begin with the same pages; tiles of one request say which rows they have."""
    q_lens, kv_lens = (list(x) for x in zip(*requests, strict=True))
    pages, fresh = [], shared
    for kv_len in kv_lens:
        count = -(-kv_len // PAGE)
        own = max(0, count - min(shared, kv_len // PAGE))
        pages.append([*range(count - own), *range(fresh, fresh + own)])
        fresh += own
    table = np.array([page for found in pages for page in found], np.int32)
    last = np.array([(n - 1) % PAGE + 1 for n in kv_lens], np.int32)
    counts = [len(found) for found in pages]
    batch = make_batch(wl.Composed(PAGE), indptr(q_lens), indptr(counts), table, last)
    full = np.array(kv_lens, np.int64) // PAGE
    forest = find_prefixes(batch.segments["index_begin"].astype(np.int64), table, full, PAGE)
    problem = Problem(batch.segments, 2, group, 16, 64, 5, 5, AllVisible(batch.segments))
    plan = make_composed_plan(
        SharedBatch(batch.segments, forest, group, PAGE, 3), problem, AllVisible, table,
    )  # fmt: skip
    items = stamped(plan)
    size = (items["q_end"] - items["q_begin"]) * (items["kv_end"] - items["kv_begin"])
    assert size.sum() == 2 * sum(q * kv for q, kv in requests)
    alone, together = items[items["request"] >= 0], items[items["request"] < 0]
    met = {(r, head): np.zeros(size, int) for r, size in enumerate(requests) for head in (0, 1)}
    for item in alone:
        rows, keys = slice(item["q_begin"], item["q_end"]), slice(item["kv_begin"], item["kv_end"])
        assert rows.stop <= requests[item["request"]][0]
        met[item["request"], item["kv_head"]][rows, keys] += 1
    of_several = np.zeros((2, max(kv_lens)), bool)
    for item in together:
        of_several[item["kv_head"], item["kv_begin"] : item["kv_end"]] = True
    for (_, head), count in met.items():  # what no tile of its own has, tiles of several have
        assert (count <= 1).all()
        assert of_several[head, : count.shape[1]][(count == 0).any(axis=0)].all()


def test_times_are_microseconds_since_the_first_item() -> None:
    plan = plan_of([(40, 200)], 2, False)
    stamps = np.zeros(len(plan.items), STAMP)
    stamps["begin"] = 10**18 + 2500 * np.arange(len(stamps))
    stamps["end"] = stamps["begin"] + 1250
    stamps["begin_cycle"], stamps["end_cycle"] = 100, 2100
    items = stamped_items(plan, stamps)
    assert items["begin_us"].tolist() == (2.5 * np.arange(len(stamps))).tolist()
    np.testing.assert_allclose(items["end_us"] - items["begin_us"], 1.25)
    assert set(items["cycles"].tolist()) == {2000}


def test_the_cta_with_the_largest_load_ends_last_at_the_mean_rate() -> None:
    """Each CTA takes three microseconds for a unit of its load: so the prediction must be."""
    plan = plan_of([(70, 300), (3, 120), (1, 290)], 2, False)
    items = stamped(plan)
    number = np.diff(plan.cta_indptr)
    took = np.repeat(3.0 * plan.loads / np.maximum(number, 1), number)
    items["end_us"] = items["begin_us"] + took
    found = predicted(plan, items, on_gpu=True, has_prices=False)
    assert found.us == pytest.approx(3.0 * plan.loads.max())
    assert "loads" in found.by


def test_two_roles_on_a_gpu_end_when_their_prices_say() -> None:
    plan = plan_of([(70, 300), (3, 120), (1, 290)], 2, True)
    found = predicted(plan, stamped(plan), on_gpu=True, has_prices=True)
    assert plan.predicted_seconds
    assert found.us == pytest.approx(1e6 * plan.predicted_seconds) and "prices" in found.by
    cheap = problems.of_problem(plan, prices=None)
    assert "loads" in predicted(cheap, stamped(cheap), on_gpu=True, has_prices=True).by


def test_threads_share_work_evenly_at_best() -> None:
    plan = plan_of([(70, 300)], 2, False)
    items = stamped(plan)
    items["sm"] = np.arange(len(items)) % 3
    items["end_us"] = items["begin_us"] + 6.0
    found = predicted(plan, items, on_gpu=False, has_prices=False)
    assert found.us == pytest.approx(2.0 * len(items))


def test_a_plan_without_items_has_none() -> None:
    plan = plan_of([(0, 300)], 2, False)
    assert len(stamped(plan)) == 0
    assert predicted(plan, stamped(plan), on_gpu=True, has_prices=False).us == 0.0
