"""Capacities hold every batch within the bounds, and are reached."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.errors import ArgumentError
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.layout import HEADER, MERGE, OPENING, SEGMENT, WORK_ITEM
from warploom.scheduler.model.visibility import AllVisible
from warploom.scheduler.plans.capacity import capacity, max_query_tiles, workspace_size
from warploom.scheduler.plans.plan import Plan

NUMBERS: dict[str, Any] = {
    "rows": 16,
    "keys": 64,
    "num_kv_heads": 8,
    "group_size": 4,
    "num_ctas": 132,
}


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_every_batch_within_the_bounds_fits(kit: Any, data: st.DataObject) -> None:
    case = kit.draw_case(data, items=5000)
    spare = st.integers(0, 50)
    least = Bounds.of(case.segments, 7)
    bounds = Bounds(
        least.max_requests + data.draw(spare),
        least.max_q_rows + data.draw(spare),
        least.max_kv_len + data.draw(spare),
        least.max_blocks + data.draw(spare),
    )
    room = capacity(bounds, **case.numbers)
    indices = np.arange(7, dtype=np.int32)
    plan = case.plan(capacity=room, indices=indices)
    assert_packed(plan, room, plan.pack(room))


def assert_packed(plan: Plan, room: Any, buffer: Any) -> None:
    """The buffer read back as a kernel reads it."""
    at = room.offsets
    counts = buffer[at["header"] :][: len(HEADER.fields)].view(HEADER.dtype)[0]
    assert counts == plan.header[0]
    indptr = buffer[at["cta_indptr"] :][: room.num_ctas + 1]
    assert np.array_equal(indptr, plan.cta_indptr)
    openings = buffer[at["openings"] :][: room.sizes["openings"]].view(OPENING)
    for cta in np.flatnonzero(np.diff(indptr)):
        first = plan.items[indptr[cta]]
        assert openings["item"][cta] == first
        assert openings["segment"][cta] == plan.segments[first["segment"]]
    for name, record, count in (
        ("items", WORK_ITEM, counts["num_items"]),
        ("segments", SEGMENT, counts["num_segments"]),
        ("merges", MERGE, counts["num_merges"]),
    ):
        stored = buffer[at[name] :][: int(count) * len(record.fields)].view(record.dtype)
        assert np.array_equal(stored, getattr(plan, name))
    assert np.array_equal(buffer[at["indices"] :][: len(plan.indices)], plan.indices)


@settings(max_examples=60, deadline=None)
@given(
    q_rows=st.integers(0, 60),
    segments=st.integers(0, 8),
    rows=st.sampled_from([1, 4, 12, 16, 64]),
    group=st.integers(1, 20),
)
def test_query_tiles_are_counted_exactly(q_rows: int, segments: int, rows: int, group: int) -> None:
    """Against trying every way to hand the rows to the segments."""
    most = np.zeros(q_rows + 1, int)  # most tiles of the segments so far, by rows used at most
    for _ in range(segments):
        tiles = -(-np.arange(q_rows + 1) * group // rows)
        most = np.array([max(most[: n + 1] + tiles[n::-1]) for n in range(q_rows + 1)])
    assert max_query_tiles(q_rows, segments, rows, group) == most[q_rows]


@pytest.mark.parametrize(("rows", "group"), [*product((16, 128), (1, 4, 7))])
def test_items_and_segments_are_reached(kit: Any, rows: int, group: int) -> None:
    """A batch of rows that waste most of their last tiles fills the item section to the end."""
    requests, q_rows = 5, 5 * 200
    bounds = Bounds(requests, q_rows, 4000)
    numbers: dict[str, Any] = NUMBERS | {"rows": rows, "group_size": group, "num_ctas": 1}
    room = capacity(bounds, **numbers)
    best = 0
    for first in range(1, rows + 1):  # all but one request end with the same waste
        q_lens = [first] * (requests - 1) + [q_rows - first * (requests - 1)]
        segments = kit.make_segments(q_lens, [100] * requests)
        case = kit.case(segments, AllVisible(segments), 8, group, rows, num_ctas=1)
        best = max(best, len(case.plan(capacity=room).items))
    assert best == room.max_items


@pytest.mark.parametrize("num_ctas", [2, 3, 8, 16])
def test_slots_and_merges_are_reached(kit: Any, num_ctas: int) -> None:
    """One tile less than CTAs: every CTA but one gives a part to the last."""
    segments = kit.make_segments([1] * (num_ctas - 1), [100_000] * (num_ctas - 1))
    case = kit.case(segments, AllVisible(segments), num_ctas=num_ctas)
    room = capacity(Bounds(num_ctas - 1, num_ctas - 1, 100_000), **case.numbers)
    plan = case.plan(capacity=room)
    assert room.max_slots == 2 * num_ctas - 2
    assert (plan.num_slots, len(plan.merges)) == (room.max_slots, room.max_merges)
    assert len(plan.items) == room.max_items


@pytest.mark.parametrize(("heads", "group", "keys"), [*product((1, 4), (1, 4), (64, 128))])
def test_fixed_splits_are_counted_exactly(kit: Any, heads: int, group: int, keys: int) -> None:
    segments = kit.make_segments([1] * 8 + [28], [5000] * 9)
    case = kit.case(segments, AllVisible(segments), heads, group, 16, keys, split_size=8 * keys)
    room = capacity(Bounds.of(segments), **case.numbers)
    plan = case.plan(capacity=room)
    used = len(plan.items), plan.num_slots, len(plan.merges), len(plan.segments)
    assert used == (room.max_items, room.max_slots, room.max_merges, room.max_segments)
    size = workspace_size(room, head_dim_v=80)
    assert size.plan_bytes == plan.pack(room).nbytes
    assert size.partial_o_bytes == 4 * plan.num_slots * 16 * 80
    assert size.partial_state_bytes == 8 * plan.num_slots * 16
    assert size.arrivals_bytes == 4 * len(plan.merges)


def test_short_lists_need_no_slots() -> None:
    """One key tile of 64 keys is the shortest piece: it is never cut, and two are cut once."""
    room = capacity(Bounds(1024, 1024, 64), **NUMBERS)
    assert (room.max_slots, room.max_merges) == (0, 0)
    assert capacity(Bounds(1024, 1024, 65), **NUMBERS).max_slots == 262


def test_sections_are_aligned_and_disjoint() -> None:
    room = capacity(Bounds(3, 100, 5000, max_blocks=9, max_segments=5), **NUMBERS)
    at = list(room.offsets.items())
    assert at[0] == ("header", 0)
    for (name, start), (_, end) in zip(at, [*at[1:], ("end", room.total_ints)], strict=True):
        assert start % 4 == 0
        assert 0 <= end - start - room.sizes[name] < 4
    size = workspace_size(capacity(Bounds(3, 100, 5000), **NUMBERS), head_dim_v=128)
    parts = [(size.offsets[name], getattr(size, f"{name}_bytes")) for name in ("plan", "partial_o")]
    assert all(start % 256 == 0 for start in size.offsets.values())
    assert parts[0][0] + parts[0][1] <= parts[1][0]
    assert (
        size.total
        == size.offsets["total"]
        >= sum(
            (size.plan_bytes, size.partial_o_bytes, size.partial_state_bytes, size.arrivals_bytes)
        )
    )


@pytest.mark.parametrize("field", ["max_requests", "max_q_rows", "max_kv_len", "max_blocks"])
@pytest.mark.parametrize("value", [-1, 2**31, 1.5])
def test_senseless_bounds_are_refused(field: str, value: Any) -> None:
    numbers: dict[str, Any] = {"max_requests": 1, "max_q_rows": 1, "max_kv_len": 1} | {field: value}
    with pytest.raises(ArgumentError, match=field):
        Bounds(**numbers)


def test_bounds_beyond_int32_records_are_refused() -> None:
    with pytest.raises(ArgumentError, match="beyond what int32 counts"):
        capacity(Bounds(2**20, 2**28, 2**20), **NUMBERS)
