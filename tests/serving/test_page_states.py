"""States of pages: the ledger beside its twin, under hypothesis and over long random runs."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pages import mapper, twin
from pages.twin import Kind, SideBySide

from warploom.memory_errors import (
    BudgetTooSmall,
    LimitReached,
    NotReserved,
    OutOfSlots,
    PoolExhausted,
)
from warploom.serving.virtual_memory.ledger import Ledger, State

PAGES, ROWS = 24, 5


class Pages(RuleBasedStateMachine):
    """Every sequence of operations, of up to three models."""

    def __init__(self) -> None:
        super().__init__()
        self.both = SideBySide(PAGES, ROWS)

    @precondition(lambda self: len(self.both.models) < 3)
    @rule(
        planes=st.sampled_from((1, 2, 3)),
        slots=st.integers(1, 4),
        guaranteed=st.integers(0, PAGES + 1),
        limit=st.integers(1, PAGES),
    )
    def add(self, planes: int, slots: int, guaranteed: int, limit: int) -> None:
        self.both.add(Kind(planes, slots, guaranteed, limit, ROWS))

    @precondition(lambda self: self.both.models)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.both.remove(data.draw(st.sampled_from(list(self.both.models))))

    @precondition(lambda self: self.both.models)
    @rule(data=st.data(), rows=st.integers(0, ROWS))
    def open(self, data: st.DataObject, rows: int) -> None:
        self.both.open(data.draw(st.sampled_from(list(self.both.models))), rows)

    @precondition(lambda self: self.both.models)
    @rule(data=st.data(), pages=st.none() | st.integers(0, PAGES))
    def trim(self, data: st.DataObject, pages: int | None) -> None:
        self.both.trim(data.draw(st.sampled_from(list(self.both.models))), pages)

    @precondition(lambda self: self.both.models)
    @rule(data=st.data(), rows=st.integers(0, ROWS))
    def extend(self, data: st.DataObject, rows: int) -> None:
        self.both.extend(self.slot(data), rows)

    @precondition(lambda self: self.both.models)
    @rule(data=st.data())
    def map(self, data: st.DataObject) -> None:
        self.both.map(self.slot(data))

    @precondition(lambda self: self.both.models)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.both.release(self.slot(data))  # of one that is released already, too

    def slot(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.both.twin.owner) - 1))

    @invariant()
    def agree(self) -> None:
        self.both.compare()
        self.both.compare_pages()


Pages.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestPages = Pages.TestCase


def test_a_long_random_run() -> None:
    done = twin.run(3000, seed=0)
    assert {"add", "remove", "open", "extend", "map", "release", "trim"} <= done.keys()
    assert done["release: NotReserved"] and done["extend: PoolExhausted"]


@pytest.mark.parametrize("seed", range(3))
def test_a_mapper_that_is_refused_things_stays_consistent(seed: int) -> None:
    done = mapper.run(1500, seed)
    for call in ("create", "map", "unmap"):
        assert done[f"refused by the driver: {call}"]
    assert done["grow: PageFailed"] and done["ahead: PageFailed"]


def test_a_mapper_that_forgets_to_undo_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are mapped and values refused: the keys must go again."""
    unmap = mapper.RefusingDriver.unmap

    def forget(driver: mapper.RefusingDriver, address: int, pages: int) -> None:
        if driver.last != "map":
            unmap(driver, address, pages)

    monkeypatch.setattr(mapper.RefusingDriver, "unmap", forget)
    with pytest.raises(AssertionError):
        mapper.run(3000, seed=0)


def test_a_page_goes_through_its_four_states() -> None:
    ledger = Ledger(1)
    model = ledger.add("m", planes=1, slots=1, guaranteed=0, limit=1)

    def state() -> State:
        return next(state for _, state, _ in ledger.pages())

    seen = [state()]
    span = ledger.open(model, 1)
    seen.append(state())
    ledger.map_held(span)
    seen.append(state())
    ledger.release(span)
    seen.append(state())
    ledger.trim(model)
    seen.append(state())
    assert seen == [State.FREE, State.ALLOCATED, State.MAPPED, State.REUSABLE, State.FREE]


def used_and_released(ledger: Ledger, *rows: int) -> list[int]:
    """Spans of one model after requests of these sizes; slots by size."""
    model = ledger.add("m", planes=1, slots=len(rows), guaranteed=0, limit=ledger.num_pages)
    spans = [ledger.open(model, count) for count in rows]
    for span in spans:
        ledger.map_held(span)
    for span in spans:
        ledger.release(span)
    return [span.slot for span in spans]


@pytest.mark.parametrize(("wanted", "found"), [(1, 2), (2, 2), (3, 0), (4, 1), (5, 1), (9, 1)])
def test_the_span_that_fits_best_is_reused(wanted: int, found: int) -> None:
    ledger = Ledger(20)
    slots = used_and_released(ledger, 3, 5, 2)  # of 9, the largest has most already
    span = ledger.open(ledger.models[0], wanted)
    assert span.slot == slots[found]
    assert ledger.reused == min(wanted, span.mapped)
    assert not ledger.unmaps, "nothing is unmapped for a span that is taken as it is"


def test_what_a_long_request_left_behind_a_short_one_is_still_reusable() -> None:
    ledger = Ledger(5)
    used_and_released(ledger, 5)
    other = ledger.add("other", planes=1, slots=1, guaranteed=0, limit=5)
    short = ledger.open(ledger.models[0], 2)
    ledger.open(other, 3)
    assert (short.held, short.mapped) == (2, 2) and len(ledger.unmaps) == 1
    with pytest.raises(PoolExhausted, match=r"1 more pages .* 0 of 5 can be had"):
        ledger.extend(short, 3)


def test_who_was_released_first_gives_first() -> None:
    ledger = Ledger(6)
    model = ledger.add("m", planes=2, slots=4, guaranteed=0, limit=6)
    spans = [ledger.open(model, 1) for _ in range(3)]
    for span in spans:
        ledger.map_held(span)
    for span in (spans[1], spans[0], spans[2]):
        ledger.release(span)
    ledger.open(model, 1)  # takes the first span as it is
    model_2 = ledger.add("n", planes=1, slots=1, guaranteed=0, limit=6)
    ledger.open(model_2, 1)
    assert [unmap.span for unmap in ledger.unmaps] == [spans[1]]


def test_guarantees_and_limits_hold() -> None:
    ledger = Ledger(10)
    first = ledger.add("first", planes=1, slots=2, guaranteed=4, limit=10)
    second = ledger.add("second", planes=1, slots=2, guaranteed=0, limit=5)
    with pytest.raises(LimitReached, match=r"second needs 6 .* has 0 of the 5"):
        ledger.open(second, 6)
    span = ledger.open(second, 5)
    with pytest.raises(LimitReached, match=r"has 5 of the 5"):
        ledger.extend(span, 6)
    with pytest.raises(PoolExhausted, match=r"6 more pages .* 5 of 10 can be had"):
        ledger.open(first, 6)
    with pytest.raises(PoolExhausted, match=r"6 more pages .* guaranteed"):
        ledger.add("third", planes=1, slots=1, guaranteed=6, limit=10)
    third = ledger.add("third", planes=1, slots=1, guaranteed=0, limit=10)
    with pytest.raises(PoolExhausted, match=r"2 more pages .* 1 of 10 can be had"):
        ledger.open(third, 2)
    ledger.open(first, 4)


def test_budgets_below_what_a_request_needs_are_refused() -> None:
    ledger = Ledger(4)
    with pytest.raises(BudgetTooSmall, match=r"each of 5 planes"):
        ledger.add("m", planes=5, slots=1, guaranteed=0, limit=4)
    with pytest.raises(BudgetTooSmall, match=r"limit_bytes is 1 .* at least 2"):
        ledger.add("m", planes=2, slots=1, guaranteed=0, limit=1)
    with pytest.raises(BudgetTooSmall, match=r"the pool is 4 .* at least 5, what is guaranteed"):
        ledger.add("m", planes=2, slots=1, guaranteed=5, limit=9)
    assert ledger.models == []


def test_double_frees_and_too_many_requests_are_refused() -> None:
    ledger = Ledger(4)
    model = ledger.add("m", planes=1, slots=1, guaranteed=0, limit=4)
    span = ledger.open(model, 1)
    with pytest.raises(OutOfSlots, match=r"all 1 places of m"):
        ledger.open(model, 1)
    ledger.release(span)
    with pytest.raises(NotReserved, match=r"in slot 0.* released already"):
        ledger.release(span)
    assert ledger.counts()[State.FREE] == 4
