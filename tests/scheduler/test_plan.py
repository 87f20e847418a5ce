"""Plans of particular batches, what is refused, and the packed buffer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from warploom.errors import (
    ArgumentError,
    BadLength,
    BoundsExceeded,
    CapacityExceeded,
    WorkspaceTooSmall,
    WrongDType,
)
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.visibility import AllVisible
from warploom.scheduler.plans.capacity import capacity
from warploom.scheduler.plans.verify import verify


@pytest.fixture
def decode(kit: Any) -> Any:
    """Builds a decode case: 8 key/value heads, groups of 4, 132 CTAs."""

    def build(kv_lens: list[int], **changes: Any) -> Any:
        segments = kit.make_segments([1] * len(kv_lens), kv_lens)
        numbers = {"num_kv_heads": 8, "group_size": 4, "num_ctas": 132} | changes
        return kit.case(segments, AllVisible(segments), **numbers)

    return build


def test_no_requests_still_write_the_sentinel(decode: Any) -> None:
    case = decode([])
    room = capacity(Bounds(4, 4, 1000), **case.numbers)
    plan = case.plan(capacity=room)
    verify(plan, case.visibility)
    buffer = plan.pack(room, np.full(room.total_ints, 77, np.int32))
    at = room.offsets["cta_indptr"]
    assert buffer[:4].tolist() == [0, 0, 0, 0]
    assert not buffer[at : at + 133].any()
    assert not buffer[room.offsets["openings"] : room.offsets["segments"]].any()
    assert np.all(buffer[room.offsets["segments"] :] == 77)


def test_requests_without_queries_get_no_item(kit: Any) -> None:
    segments = kit.make_segments([0, 5, 0], [100, 100, 0])
    plan = kit.case(segments, AllVisible(segments)).plan()
    assert plan.items["segment"].tolist() == [1]


def test_rows_without_visible_keys_get_an_item_without_keys(kit: Any) -> None:
    """No keys at all, and a causal mask with more queries than keys."""
    segments = kit.make_segments([3, 40], [0, 8])
    mask = kit.window(segments, 1)
    plan = kit.case(segments, mask).plan()
    verify(plan, mask)
    items = sorted(plan.items[["segment", "row_begin", "kv_end"]].tolist())
    assert items == [(0, 0, 0), (1, 0, 0), (1, 16, 0), (1, 32, 8)]


def test_whole_tiles_write_through(decode: Any) -> None:
    plan = decode([1024] * 128).plan()
    assert plan.num_slots == len(plan.merges) == 0
    assert len(plan.items) == 1024
    assert np.all(plan.items["slot"] == -1)


def test_one_long_request_fills_the_grid(decode: Any) -> None:
    case = decode([65536])
    plan = case.plan()
    assert plan.busy_ctas >= 128
    assert plan.balance < 1.05
    assert len(plan.merges) == 8
    assert plan.num_slots <= 2 * 132 - 2


def test_equal_tiles_that_do_not_divide_by_the_grid_are_levelled(decode: Any) -> None:
    """192 equal tiles on 132 CTAs: cutting before assigning would leave 1.38."""
    assert decode([8192] * 24).plan().balance < 1.04


def test_neighbours_in_time_share_keys_where_load_allows(kit: Any) -> None:
    """With many short items the order is by request and head, not by exact length."""
    segments = kit.make_segments([4096] * 8, [4096] * 8)
    plan = kit.case(segments, kit.window(segments, 1), 4, 1, 128, 64, 4).plan()
    first_wave = plan.items[plan.cta_indptr[:-1]]
    assert len({(int(item["segment"]), int(item["kv_head"])) for item in first_wave}) == 1


def test_holes_split_by_what_is_visible(kit: Any) -> None:
    """A window at the far end and sinks at the start: parts carry like numbers of visible tiles."""
    segments = kit.make_segments([1], [100_000])
    mask = kit.window(segments, 1, left=4095, sinks=64)
    plan = kit.case(segments, mask, num_ctas=4).plan()
    verify(plan, mask)
    assert plan.balance < 1.12
    # Of 66 visible tiles the first part has the sinks and 17 of the window, which begins at 95,872.
    assert sorted(plan.items["kv_begin"].tolist()) == [0, 96_960, 98_112, 99_264]


def test_fixed_splits_leave_out_what_nobody_sees(kit: Any) -> None:
    segments = kit.make_segments([1], [100_000])
    mask = kit.window(segments, 1, left=4095, sinks=64)
    plan = kit.case(segments, mask, split_size=2048).plan()
    verify(plan, mask)
    assert sorted(plan.items["kv_begin"].tolist()) == [0, 94_208, 96_256, 98_304]


def test_bounds_name_both_numbers(decode: Any) -> None:
    case = decode([500, 900])
    for bounds, name, got, bound in (
        (Bounds(1, 8, 1000, 6), "max_requests", 2, 1),
        (Bounds(2, 1, 1000, 6), "max_q_rows", 2, 1),
        (Bounds(2, 2, 899, 6), "max_kv_len", 900, 899),
        (Bounds(2, 2, 900, 5), "max_blocks", 6, 5),
        (Bounds(2, 2, 900, 6, max_segments=1), "max_segments", 2, 1),
    ):
        room = capacity(bounds, **case.numbers)
        with pytest.raises(BoundsExceeded) as caught:
            case.plan(capacity=room, indices=np.zeros(6, np.int32))
        assert caught.value.facts == {"name": name, "got": got, "bound": bound}


def test_a_capacity_for_other_numbers_is_refused(decode: Any) -> None:
    case = decode([4000] * 3)
    numbers = {key: value for key, value in case.numbers.items() if key != "split_size"}
    room = capacity(Bounds.of(case.segments), **numbers)
    with pytest.raises(CapacityExceeded, match="work items"):
        case.plan(capacity=room, split_size=64)
    with pytest.raises(CapacityExceeded, match="CTAs"):
        case.plan(capacity=room, num_ctas=64)


@pytest.mark.parametrize(
    "section", ["max_items", "max_segments", "max_merges", "max_slots", "max_indices"]
)
def test_one_record_too_many_is_refused(decode: Any, section: str) -> None:
    case = decode([65536], split_size=4096)
    room = capacity(Bounds(1, 1, 65536, 5), **case.numbers)
    indices = np.zeros(5, np.int32)
    case.plan(capacity=room, indices=indices)
    with pytest.raises(CapacityExceeded):
        one_less = replace(room, **{section: getattr(room, section) - 1})
        case.plan(capacity=one_less, indices=indices)


def test_pack_refuses_before_it_writes(decode: Any) -> None:
    case = decode([4000] * 3)
    room = capacity(Bounds.of(case.segments), **case.numbers)
    small = capacity(Bounds(1, 1, 4000), **case.numbers)
    out = np.full(room.total_ints, 7, np.int32)
    with pytest.raises(CapacityExceeded, match="work items"):
        case.plan().pack(small, out)
    with pytest.raises(WorkspaceTooSmall, match=str(4 * room.total_ints)):
        case.plan().pack(room, out[:-1])
    with pytest.raises(WrongDType):
        case.plan().pack(room, out.view(np.float32))  # type: ignore[arg-type]
    assert np.all(out == 7)


@pytest.mark.parametrize(
    ("name", "value"),
    [("sm_limit", 0), ("num_ctas", 0), ("rows", 0), ("split_size", 0), ("section_keys", 0)],
)
def test_senseless_numbers_are_refused(decode: Any, name: str, value: int) -> None:
    wanted = {"sm_limit": "active_ctas"}.get(name, name)
    with pytest.raises(ArgumentError, match=wanted):
        decode([10]).plan(**{name: value})


@pytest.mark.parametrize(
    ("field", "value"), [("num_q", -1), ("kv_count", -5), ("kv_count", 2**31 - 1), ("num_q", 2**29)]
)
def test_senseless_segments_are_refused(decode: Any, field: str, value: int) -> None:
    case = decode([10, 10])
    case.segments[field][1] = value
    with pytest.raises(BadLength, match=rf"segments.{field}\[1\] is {value}"):
        case.plan()


def test_wrong_types_are_refused(decode: Any) -> None:
    case = decode([10])
    with pytest.raises(WrongDType, match="indices"):
        case.plan(indices=np.zeros(3, np.int64))
    with pytest.raises(WrongDType, match="segments"):
        replace(case, segments=np.zeros(3, np.int32)).plan()


def test_plans_count_their_work(decode: Any) -> None:
    case = decode([65536], sm_limit=100)
    plan = case.plan()
    assert (plan.problem.active_ctas, plan.problem.num_ctas) == (100, 132)
    assert 90 < plan.busy_ctas <= 100
    assert len(plan.merges) == 8
    assert 1 <= plan.balance < 1.1
    assert decode([]).plan().balance == 1.0
