"""Captures within a budget: which goes first, what comes back, and that no capture is left over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import warploom as wl
from warploom.graph_errors import BudgetBelowCapture
from warploom.serving.graphs.store import Entry, Link, Store

BUCKETS = (1, 2, 4, 8)


class FakeCapture:
    """Memory of its own, and room that it needs in the shared pool."""

    def __init__(self, driver: FakeDriver, own: int, shared: int) -> None:
        self.own_bytes, self._driver, self.is_open = own, driver, True
        driver.live.append(self)
        driver.shared_bytes = max(driver.shared_bytes, shared)

    def replay(self) -> None:
        assert self.is_open

    def close(self) -> None:
        assert self.is_open, "closed twice"
        self.is_open = False
        self._driver.live.remove(self)
        if not self._driver.live:
            self._driver.shared_bytes = 0


class FakeDriver:
    """What a store needs of a driver."""

    def __init__(self) -> None:
        self.live: list[FakeCapture] = []
        self.shared_bytes = 0

    def drain(self) -> None:
        pass


def maker(driver: FakeDriver, rows: int, own: int, shared: int) -> Callable[[], Entry]:
    def make() -> Entry:
        capture = FakeCapture(driver, own, shared)
        return Entry(("full", rows), (Link(None, capture),), 0.25)  # type: ignore[arg-type]

    return make


sizes = st.dictionaries(
    st.integers(1, 6), st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1
)


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(20, 150), st.data())
def test_the_least_recently_used_goes_first(
    sizes: dict[int, tuple[int, int]], budget: int, data: st.DataObject
) -> None:
    """Against the plain definition, for which the shared pool shrinks only when all are gone."""
    driver = FakeDriver()
    store = Store(driver, budget)  # type: ignore[arg-type]
    used: list[int] = []  # what is held, the least recently used first
    refused: set[int] = set()
    shared = 0
    for rows in data.draw(st.lists(st.sampled_from(sorted(sizes)), max_size=25)):
        own, needs = sizes[rows]
        make = maker(driver, rows, own, needs)
        if rows in used:
            used.remove(rows)
            used.append(rows)
        elif rows in refused:
            pass
        elif own > budget:
            shared = max(shared, needs) if used else 0
            if sum(sizes[one][0] for one in used) + shared > budget:
                used, shared = [], 0
        else:
            used.append(rows)
            shared = max(shared, needs)
            while used[:-1] and sum(sizes[one][0] for one in used) + shared > budget:
                del used[0]
            if used == [rows] and own + shared > budget:
                shared = needs  # all were gone in between
        if own + needs > budget:
            used = [one for one in used if one != rows]
            refused.add(rows)
            shared = shared if used else 0
            with pytest.raises(BudgetBelowCapture):
                store.get(("full", rows), make, "this")
        else:
            store.get(("full", rows), make, "this")
        assert [entry.key[1] for entry in store.entries] == used
        assert len(driver.live) == len(used) and all(one.is_open for one in driver.live)
        assert store.num_bytes == sum(sizes[one][0] for one in used) + (shared if used else 0)
        assert store.num_bytes <= budget
    store.clear()
    assert driver.live == [] and store.num_bytes == 0


def step(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.new_ones(16, 16)).relu() + 1


def pool_of(max_bytes: int | None = None) -> wl.GraphPool:
    inputs = {"x": wl.GraphInput(torch.float32, (16,))}
    return wl.GraphPool(step, inputs, wl.Bounds(8, 8, 8), device="cpu", max_bytes=max_bytes)


def run(pool: wl.GraphPool, rows: int) -> None:
    x = torch.randn(rows, 16)
    torch.testing.assert_close(pool.run({"x": x}), step(x))


def test_all_captures_share_what_the_largest_needs() -> None:
    alone = {}
    for rows in BUCKETS:
        run(pool := pool_of(), rows)
        alone[rows] = pool.stats().shared_bytes
    pool = pool_of()
    for rows in BUCKETS:
        run(pool, rows)
    assert pool.stats().shared_bytes == max(alone.values()) < sum(alone.values())


def test_evicted_buckets_are_captured_again() -> None:
    run(pool := pool_of(), 8)
    of_one = pool.stats().own_bytes
    pool = pool_of(pool.stats().shared_bytes + 2 * of_one)
    for rows in (8, 4, 8, 2):
        run(pool, rows)
    assert [rows for _, rows in pool.stats().captured] == [8, 2]  # 4 was not used for longest
    assert pool.stats().evictions == 1
    run(pool, 4)
    stats = pool.stats()
    assert [rows for _, rows in stats.captured] == [2, 4] and stats.captures == 4
    assert stats.evictions == 2


def test_warm_up_evicts_nothing() -> None:
    run(pool := pool_of(), 8)
    pool = pool_of(pool.stats().shared_bytes + 2 * pool.stats().own_bytes)
    assert pool.warm_up() == 2
    assert [rows for _, rows in pool.stats().captured] == [8, 4] and pool.stats().evictions == 0
    pool.clear()
    assert pool.stats().shared_bytes == pool.stats().own_bytes == 0
    run(pool, 8)


def test_warm_up_ends_within_the_budget() -> None:
    """The largest does not fit, and has enlarged what is shared with a smaller one."""
    run(pool := pool_of(), 2)
    budget = pool.stats().shared_bytes + pool.stats().own_bytes
    run(pool := pool_of(budget), 1)
    assert pool.warm_up() == len(pool.stats().captured) > 0
    assert pool.stats().shared_bytes + pool.stats().own_bytes <= budget
    run(pool, 1)


def test_a_store_is_within_its_budget_after_what_did_not_fit() -> None:
    driver = FakeDriver()
    store = Store(driver, 100)  # type: ignore[arg-type]
    store.get(("full", 1), maker(driver, 1, 10, 10), "this")
    assert not store.add_if_it_fits(("full", 8), maker(driver, 8, 10, 95))
    assert store.num_bytes == 0 and store.evictions == 1 and driver.live == []
    assert store.add_if_it_fits(("full", 4), maker(driver, 4, 10, 50))


def test_what_cannot_fit_alone_throws_nobody_out() -> None:
    driver = FakeDriver()
    store = Store(driver, 100)  # type: ignore[arg-type]
    for rows in (1, 2):
        store.get(("full", rows), maker(driver, rows, 10, 10), "this")
    with pytest.raises(BudgetBelowCapture, match="101 bytes or more"):
        store.get(("full", 8), maker(driver, 8, 101, 20), "this")
    assert [rows for _, rows in (one.key for one in store.entries)] == [1, 2]
    with pytest.raises(BudgetBelowCapture):  # by its shared memory, which only trying tells
        store.get(("full", 4), maker(driver, 4, 60, 60), "this")
    store.get(("full", 1), maker(driver, 1, 10, 10), "this")
    captures = store.captures
    for rows in (8, 4):
        with pytest.raises(BudgetBelowCapture):
            store.get(("full", rows), maker(driver, rows, 1, 1), "this")
        assert not store.add_if_it_fits(("full", rows), maker(driver, rows, 1, 1))
    assert store.captures == captures and len(store.entries) == 1
    store.clear()
    store.get(("full", 8), maker(driver, 8, 1, 1), "this")


def test_calls_of_the_step_are_as_many_as_told() -> None:
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return step(x)

    calls: list[int] = []
    inputs = {"x": wl.GraphInput(torch.float32, (16,))}
    run(probe := pool_of(), 4)
    taken = probe.stats().shared_bytes + probe.stats().own_bytes
    pool = wl.GraphPool(
        counted, inputs, wl.Bounds(8, 8, 8), device="cpu", max_bytes=taken, on_failure="eager"
    )
    found = []
    for rows in (4, 1, 8, 8):
        calls.clear()
        run(pool, rows)
        found.append(list(calls))
    # 8 is captured with what others have shared, and alone, and runs eagerly: but only once
    assert found == [[4] * 2, [1] * 2, [8] * 5, [8]]
