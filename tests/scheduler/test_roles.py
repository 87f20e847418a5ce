"""Plans of several roles: every visible pair is met once, by a tile of the right size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plan_text_roles
from support.mixed_plans import DEALT, ON_A_LINE, PRICES, Mixed, busy, mixed
from support.problems import of_problem, plan_of
from support.sampling import few

from warploom.errors import ArgumentError, PlanInvalid
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.constants import PER_SHARED_PREFILL
from warploom.scheduler.model.layout import (
    HEADER,
    ROLE_HEADER,
    ROLE_ITEM,
    SHARED_DECODES,
    SHARED_PREFILLS,
    WORK_ITEM,
    c_structs,
)
from warploom.scheduler.model.roles import Role, RolePrices, num_lists, roles_of
from warploom.scheduler.model.visibility import AllVisible
from warploom.scheduler.partition import worklist
from warploom.scheduler.plans.capacity import capacity, workspace_size
from warploom.scheduler.plans.plan import Plan
from warploom.scheduler.plans.unpack import unpack, unpack_batch
from warploom.scheduler.plans.verify import verify

# What planners find.
WORK = (
    "cta_indptr", "items", "merges", "loads", "num_shared_prefills", "num_decode_ctas",
    "num_shared_decodes",
)  # fmt: skip


def sees(case: Mixed, segment: Any, rows: Any) -> Any:
    """bool (rows, keys): which keys these fused rows see, row by row."""
    key = np.arange(int(segment["kv_count"]))
    if case.left < 0:
        return np.ones((len(rows), len(key)), bool)
    place = rows // case.numbers["group_size"] + int(segment["kv_len"]) - int(segment["q_len"])
    return (key <= place[:, None]) & (key >= place[:, None] - case.left)


def assert_each_pair_once(case: Mixed, plan: Plan) -> None:
    for number, segment in enumerate(plan.segments):
        fused = int(segment["num_q"]) * plan.problem.group_size
        for head in range(plan.problem.num_kv_heads):
            met = np.zeros((fused, int(segment["kv_count"])), int)
            written = np.zeros(fused, int)
            for item in plan.items[(plan.items["segment"] == number)]:
                if item["kv_head"] != head:
                    continue
                begin = int(item["row_begin"])
                end = min(begin + plan.problem.roles[item["role"]].rows, fused)
                met[begin:end, item["kv_begin"] : item["kv_end"]] += 1
                written[begin:end] += 1
            visible = sees(case, segment, np.arange(fused))
            assert (met[visible] == 1).all() and met.max(initial=0) <= 1
            assert (written >= 1).all()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_each_visible_pair_is_met_once(kit: Any, data: st.DataObject) -> None:
    case = data.draw(mixed(kit))
    plan = case.plan()
    assert plan.items.dtype == ROLE_ITEM.dtype
    assert len(plan.cta_indptr) == 11 * plan.problem.num_ctas + 1
    verify(plan, case.visibility)
    assert_each_pair_once(case, plan)
    fused = plan.segments["num_q"] * plan.problem.group_size
    held = [fused[plan.items["segment"]] <= role.rows for role in plan.problem.roles]
    for number, own in enumerate(held[1:], 1):  # the fewest rows that hold all
        fits_less = held[number + 1] if number + 1 < len(held) else own & False
        assert np.array_equal(plan.role == number, own & ~fits_less)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_batch_within_the_bounds_fits(kit: Any, data: st.DataObject) -> None:
    case = data.draw(mixed(kit))
    least, spare = Bounds.of(case.segments), st.integers(0, 50)
    bounds = Bounds(
        least.max_requests + data.draw(spare),
        least.max_q_rows + data.draw(spare),
        least.max_kv_len + data.draw(spare),
    )
    room = capacity(bounds, **case.numbers)
    plan = case.plan(capacity=room)
    tile = {name: value for name, value in case.numbers.items() if name != "smaller"}
    alone = capacity(bounds, **tile)
    # Cuts may be more: smaller key tiles have more borders. Tiles are not.
    assert room.max_items - room.max_slots + room.max_merges <= alone.max_items
    packed = plan.pack(room)
    segments, indices = unpack_batch(packed, room, 0)
    assert np.array_equal(segments, plan.segments)
    again = unpack(packed, room, case.problem(), indices)
    for name in ("header", "cta_indptr", "items", "merges", "loads"):
        assert np.array_equal(getattr(again, name), getattr(plan, name)), name
    assert again.items.dtype == plan.items.dtype
    verify(again, case.visibility)


@settings(max_examples=few(60, of=150), deadline=None)
@given(data=st.data())
def test_the_text_says_the_same(kit: Any, data: st.DataObject) -> None:
    problem = data.draw(mixed(kit)).problem()
    fast, slow = worklist.build(problem), plan_text_roles.build(problem)
    for name in WORK:
        assert np.array_equal(getattr(fast, name), getattr(slow, name)), name


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize(("limit", "claim"), [(None, 256), (9, 256), (None, 1)])
def test_the_text_shares_the_same_decodes(kit: Any, heads: int, limit: int, claim: int) -> None:
    case = replace(busy(kit, limit), prices=RolePrices((160, 30), 30, claim))
    case.numbers["num_kv_heads"] = heads
    fast, slow = worklist.build(case.problem()), plan_text_roles.build(case.problem())
    decoding = fast.num_decode_ctas
    assert decoding > 0 and fast.num_shared_decodes in (2 * decoding, 3 * decoding)
    for name in WORK:
        assert np.array_equal(getattr(fast, name), getattr(slow, name)), name


def damaged(plan: Plan) -> Plan:
    return replace(plan, items=plan.items.copy())


def test_each_wrong_role_is_seen(kit: Any) -> None:
    case = busy(kit)
    plan = case.plan()
    verify(plan, case.visibility)
    assert plan.num_slots > 0 and set(plan.role) == {0, 1}
    for at in (0, len(plan.items) // 2, len(plan.items) - 1):
        for role in {-1, 0, 1, 2} - {int(plan.role[at])}:
            wrong = damaged(plan)
            wrong.items["role"][at] = role
            with pytest.raises(PlanInvalid, match="role"):
                verify(wrong, case.visibility)


def test_roles_that_all_items_of_a_segment_change_together_are_seen(kit: Any) -> None:
    case = busy(kit)
    for segment, role in ((0, 1), (1, 0)):
        wrong = damaged(case.plan())
        wrong.items["role"][wrong.items["segment"] == segment] = role
        with pytest.raises(PlanInvalid, match="another role"):
            verify(wrong, case.visibility)


@pytest.mark.parametrize(
    "change",
    [
        {"smaller": (Role("decode", 12, 128),)},
        {"smaller": (Role("decode", 2, 64),)},
        {"rows": 24},
        {"keys": 256},
    ],
    ids=str,
)
def test_items_of_other_tiles_are_seen(kit: Any, change: dict[str, Any]) -> None:
    """A plan that was made for one tile and says another."""
    case = busy(kit)
    with pytest.raises(PlanInvalid):
        verify(of_problem(case.plan(), **change), case.visibility)


@pytest.mark.parametrize("step", [-64, 64])
def test_keys_that_no_item_meets_or_two_do_are_seen(kit: Any, step: int) -> None:
    case = busy(kit)
    wrong = damaged(case.plan())
    part = np.flatnonzero((wrong.role == 1) & (wrong.items["kv_begin"] > 0))[0]
    wrong.items["kv_begin"][part] += step
    with pytest.raises(PlanInvalid, match="keys"):
        verify(wrong, case.visibility)


@pytest.mark.parametrize("limit", [None, 40])
def test_ctas_have_one_role_and_equal_loads(kit: Any, limit: int | None) -> None:
    plan = busy(kit, limit).plan(prices=RolePrices((160, 30), 1000))
    prefill, decode = plan.work_of_roles()
    assert (prefill.role.name, decode.role.name) == ("prefill", "decode")
    assert (prefill.segments, decode.segments) == (1, 31)
    assert prefill.items + decode.items == len(plan.items)
    active, ctas = limit or 64, plan.problem.num_ctas
    assert prefill.ctas + decode.ctas == plan.busy_ctas  # none has both
    assert 0 <= active - plan.busy_ctas < 2  # decodes of two heads have as many each
    has = np.diff(plan.cta_indptr) > 0
    first = active - prefill.ctas
    assert has[ctas:][: decode.ctas].all() and has[first:active].all()
    own = plan.loads[first:active]
    shared = plan.loads[2 * ctas :][: plan.num_shared_prefills]
    assert prefill.shared == plan.num_shared_prefills == prefill.ctas
    assert decode.shared == plan.num_shared_decodes
    assert own.max() <= 1.06 * own.mean()
    assert 0.9 < shared.sum() * (PER_SHARED_PREFILL - 1) / own.sum() < 1.1
    assert plan.balance < 1.12


@pytest.mark.parametrize(("claim", "parts"), [(128, (4, 2, 1)), (256, (2, 1))])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_some_decodes_are_for_those_who_are_done(
    kit: Any, heads: int, claim: int, parts: tuple[int, ...]
) -> None:
    """An eighth of the decodes, in lists of which each is half as long as the one before."""
    case = replace(busy(kit), prices=RolePrices((160, 30), 1000, claim * heads))
    case.numbers["num_kv_heads"] = heads
    plan = case.plan()
    decoding = int(plan.header["num_decode_ctas"][0])
    assert plan.work_of_roles()[1].ctas == decoding
    assert plan.work_of_roles()[1].shared == plan.num_shared_decodes == len(parts) * decoding
    own, shared = plan.loads[64:128][:decoding], plan.loads[SHARED_DECODES * 64 :]
    mean = (own.sum() + shared.sum()) / decoding
    ends = np.split(shared[: len(parts) * decoding], len(parts))
    shares = 7 / 8, *(part / (8 * sum(parts)) for part in parts)
    for lists, share in zip((own, *ends), shares, strict=True):
        assert abs(lists.mean() - share * mean) < 0.04 * mean
        assert np.ptp(lists) < 0.1 * mean  # a boundary moves by a part of it
    assert plan.balance < 1.12
    assert shared[len(parts) * decoding :].sum() == 0
    verify(plan, case.visibility)


@pytest.mark.parametrize(("keys", "lengths"), [(4000, 0), (80_000, 2), (150_000, 3)])
def test_short_decodes_are_not_worth_claiming(kit: Any, keys: int, lengths: int) -> None:
    """The shortest of three is 1 of 56 of a CTA's work, or of two 1 of 24; 1,024 keys at least."""
    segments = kit.make_segments([500, *[1] * 30], [500, *[keys] * 30])
    numbers = {**busy(kit).numbers, "num_kv_heads": 1, "group_size": 8}
    mask = kit.window(segments, 8)
    plan = Mixed(segments, mask, 2**40, numbers, None, RolePrices((100, 30), 20)).plan()
    decoding = int(plan.header["num_decode_ctas"][0])
    assert decoding > 1 and plan.num_shared_prefills > 0
    assert plan.num_shared_decodes == lengths * decoding
    verify(plan, mask)


def test_ctas_are_shared_out_by_price() -> None:
    by_work, by_memory = RolePrices((10, 2), 1000), RolePrices((10, 2), 20)
    assert by_work.ctas((300, 500), 100) == (75, 25)
    # 1000 ps of decodes on 20 CTAs take 50, in which 60 do the 3000 of prefills: 20 are to spare
    assert by_memory.ctas((300, 500), 100) == (65, 35)
    assert by_memory.ctas((20, 500), 100) == (40, 60)  # 4 do it, and 80 do not saturate memory
    assert RolePrices((10, 2), 25).ctas((300, 500), 100) == (75, 25)  # 75 do it: none is
    assert by_memory.time((3000, 1000), 100) == 50 and by_work.time((3000, 1000), 100) == 40
    assert by_work.ctas((1, 10**6), 100) == (1, 99) and by_work.ctas((10**6, 1), 100) == (99, 1)
    assert by_work.ctas((300, 0), 100) == (100, 0) and by_work.ctas((0, 5), 100) == (0, 100)
    assert by_work.ctas((300, 500), 1) == (1, 1) and by_work.ctas((0, 0), 7) == (0, 7)


def test_prices_of_tiles_are_those_of_units() -> None:
    roles = Role("prefill", 48, 128), Role("decode", 12, 64)
    # A tile of 128 keys is 8 units of 16, one of 64 keys 16 units of 4.
    assert RolePrices.of_tiles(roles, (8000, 1601), 7) == RolePrices((1000, 101), 7)


def test_the_predicted_time_is_that_of_the_loads(kit: Any) -> None:
    plan = busy(kit).plan()
    decodes = plan.loads[64:128].sum()
    expected = max(decodes / PRICES.saturating, plan.loads.sum() / 64)
    assert plan.predicted_seconds == pytest.approx(expected / 1e12, abs=1e-12)
    assert busy(kit).plan(smaller=()).predicted_seconds is None


def test_one_cta_has_both_roles_and_shares_nothing(kit: Any) -> None:
    plan = busy(kit, 1).plan()
    prefill, decode = plan.work_of_roles()
    assert (prefill.ctas, decode.ctas, plan.busy_ctas, plan.num_shared_prefills) == (1, 1, 1, 0)
    assert plan.num_shared_decodes == 0
    assert len(plan.merges) == 0
    verify(plan, busy(kit).visibility)


@pytest.mark.parametrize("ways", [ON_A_LINE, DEALT], ids=["line", "dealt"])
@pytest.mark.parametrize("role", [0, 1])
def test_one_role_alone_has_all_ctas(kit: Any, role: int, ways: dict[str, Any]) -> None:
    segments = kit.make_segments([[700], [1] * 31][role], [[6000], [9000] * 31][role])
    mask = kit.window(segments, 4)
    plan = Mixed(segments, mask, 2**40, busy(kit).numbers, None, ways=ways).plan()
    work = plan.work_of_roles()
    ctas = (64, 62)[role]  # 62 for 31 equal decodes of two heads
    assert (work[role].ctas, work[1 - role].ctas, work[1 - role].items) == (ctas, 0, 0)
    claimed = 64 if role == 0 and ways is ON_A_LINE else 0
    assert (plan.num_shared_prefills, plan.num_shared_decodes) == (claimed, 0)
    verify(plan, mask)


def test_openings_are_those_of_lists(kit: Any) -> None:
    plan = busy(kit).plan()
    openings = plan.openings()
    assert len(openings) == num_lists(64, 2) == 704
    for number in np.flatnonzero(np.diff(plan.cta_indptr)):
        item = plan.items[plan.cta_indptr[number]]
        assert openings["item"][number].tolist() == item.tolist()
        assert openings["segment"][number] == plan.segments[item["segment"]]


def taken(plan: Plan, by: int) -> Plan:
    """A list takes the last item of those before it."""
    indptr = plan.cta_indptr.copy()
    indptr[: by + 1] = np.minimum(indptr[: by + 1], indptr[by] - 1)
    return replace(plan, cta_indptr=indptr)


def test_items_in_lists_of_others_are_seen(kit: Any) -> None:
    case = replace(busy(kit, 40), prices=RolePrices((160, 30), 10, 700))
    plan = case.plan()
    assert plan.num_shared_decodes == 40
    for number in (64, SHARED_PREFILLS * 64, SHARED_DECODES * 64):
        with pytest.raises(PlanInvalid, match="lies in a list of another role"):
            verify(taken(plan, number), case.visibility)
    for number in (40, 63, 64 + 40, 64 + 63):
        with pytest.raises(PlanInvalid, match="above the SM limit"):
            verify(taken(plan, number), case.visibility)
    for name, by, reason in (
        ("num_shared_prefills", -1, "that no CTA claims has work"),
        ("num_shared_prefills", (SHARED_DECODES - SHARED_PREFILLS) * 64, "beyond all"),
        ("num_shared_decodes", -1, "that no CTA claims has work"),
        ("num_shared_decodes", 21, "beyond all"),
        ("num_active", 1, "active CTAs"),
        ("num_decode_ctas", 40, "more CTAs decode than may"),
        ("claimed", 1, "counter of the header is not zero"),
        ("claimed_decodes", 1, "counter of the header is not zero"),
        ("drawn", 1, "counter of the header is not zero"),
    ):
        header = plan.header.copy()
        header[name] += by
        with pytest.raises(PlanInvalid, match=reason):
            verify(replace(plan, header=header), case.visibility)


def test_decodes_behind_those_that_decode_are_seen(kit: Any) -> None:
    case = replace(busy(kit, 40), prices=RolePrices((160, 30), 10, 10**6))  # shares no decodes
    plan = case.plan()
    plan.header["num_decode_ctas"] -= 1
    with pytest.raises(PlanInvalid, match="behind those that the header says"):
        verify(plan, case.visibility)


def test_one_role_has_the_records_of_before(kit: Any) -> None:
    case = busy(kit)
    plan = case.plan(smaller=())
    assert plan.items.dtype == WORK_ITEM.dtype and set(plan.role) == {0}
    assert plan.header.dtype == HEADER.dtype and len(plan.cta_indptr) == 65
    assert busy(kit).plan().header.dtype == ROLE_HEADER.dtype
    for field in ("int role;", "int num_shared_prefills;", "int num_active;"):
        assert field in c_structs(roles=True) and field not in c_structs()
    assert len(plan.work_of_roles()) == 1


def test_slots_have_room_for_the_largest_tile(kit: Any) -> None:
    case = busy(kit)
    bounds = Bounds.of(case.segments)
    room = capacity(bounds, **case.numbers)
    size = workspace_size(room, 32)
    assert size.partial_o_bytes == 4 * room.max_slots * 48 * 32
    assert size.plan_bytes == 4 * room.total_ints
    assert size.total == size.offsets["stamps"]
    with pytest.raises(ArgumentError, match="at most 65535"):
        capacity(bounds, **{**case.numbers, "num_ctas": 2**16})
    case.numbers["smaller"] = ()
    alone = workspace_size(capacity(bounds, **case.numbers), 32)
    assert alone.total == alone.offsets["stamps"]


def test_no_segments(kit: Any) -> None:
    segments = kit.make_segments([], [])
    plan = plan_of(segments, visibility=AllVisible(segments), prices=PRICES, **busy(kit).numbers)
    verify(plan, AllVisible(segments))
    assert (
        plan.items.dtype == ROLE_ITEM.dtype and len(roles_of(segments, 4, plan.problem.roles)) == 0
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"smaller": (Role("decode", 48, 64),)}, "decode has 48 rows; expected fewer than prefill"),
        ({"smaller": (Role("decode", 0, 64),)}, "expected at least 1 x 1"),
        ({"smaller": (Role("a", 8, 64), Role("b", 8, 64))}, "b has 8 rows; expected fewer than a"),
        ({"smaller": (Role("a", 8, 64), Role("b", 4, 64))}, "are 3; expected 2 at most"),
        ({"prices": None}, "two roles need some"),
        ({"prices": RolePrices((1, 0), 1)}, "two roles need some of at least 1"),
        ({"prices": RolePrices((1, 1), 1, 0)}, "two roles need some of at least 1"),
        ({"split_size": 0}, "split_size: is 0; expected at least 1"),
        ({"section_keys": 256}, "excludes section_keys"),
        ({"stream_k": True}, "excludes .* stream_k"),
    ],
)
def test_refusals(kit: Any, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        busy(kit).plan(**changes)
