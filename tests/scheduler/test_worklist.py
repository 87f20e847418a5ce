"""Properties of every plan, over random batches, masks, tiles and grids."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from warploom.scheduler.model.constants import SNAP, WORTH_CUTTING, WORTH_SAVING
from warploom.scheduler.model.cost import PIECE
from warploom.scheduler.model.visibility import AllVisible
from warploom.scheduler.partition import balance
from warploom.scheduler.partition.stream_k import Grid
from warploom.scheduler.plans.verify import verify


@pytest.mark.parametrize(("longest", "examples"), [((300, 5000), 70), ((100_000,), 10)])
def test_work_lists_equal_the_text(kit: Any, longest: tuple[int, ...], examples: int) -> None:
    """The reference walks from tile to tile, so that few requests of it are very long."""

    @settings(max_examples=examples, deadline=None)
    @given(data=st.data())
    def both_are_equal(data: st.DataObject) -> None:
        check_both(kit.draw_case(data, items=400, longest=longest))

    both_are_equal()


def check_both(case: Any) -> None:
    fast, slow = case.both()
    assert np.array_equal(fast.cta_indptr, slow.cta_indptr)
    assert np.array_equal(fast.items, slow.items)
    assert np.array_equal(fast.merges, slow.merges)
    assert np.array_equal(fast.loads, slow.loads)


def test_sections_run_one_after_another(kit: Any) -> None:
    """Heads whose keys fit the cache together are assigned before the next ones."""
    segments = kit.make_segments([512] * 3, [1000] * 3)
    case = kit.case(segments, kit.window(segments, 1), num_kv_heads=4, section_keys=2000)
    items = case.plan(num_ctas=1).items
    section = (items["segment"] * 4 + items["kv_head"]) // 2
    assert np.array_equal(np.unique(section), np.arange(6))
    assert np.all(np.diff(section) >= 0)


@pytest.mark.parametrize("heads", [1, 8, 32])
def test_tiles_of_the_same_keys_are_cut_at_the_same_places(kit: Any, heads: int) -> None:
    segments = kit.make_segments([100], [131_072])
    visibility = AllVisible(segments)
    case = kit.case(segments, visibility, heads, 4, rows=128, keys=128, num_ctas=132, stream_k=True)
    items = case.plan().items
    ends = (items["kv_end"][items["row_begin"] == row] for row in set(items["row_begin"]))
    cuts = [sorted(ends_of_tile)[:-1] for ends_of_tile in ends]
    assert len(cuts) == 4 and (heads == 32 or len(cuts[0]) > 0)
    assert all(places == cuts[0] for places in cuts)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_plan_verifies(kit: Any, data: st.DataObject) -> None:
    case = kit.draw_case(data)
    plan = case.plan()
    verify(plan, case.visibility)
    assert plan.problem.split_size or plan.num_slots <= max(0, 2 * plan.problem.active_ctas - 2)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_loads_are_what_the_items_cost(kit: Any, data: st.DataObject) -> None:
    """Also where holes lie between the keys of a tile that was cut."""
    case = kit.draw_case(data)
    plan, model = case.plan(), case.problem().cost_model
    items = {name: plan.items[name].astype(np.int64) for name in plan.items.dtype.names or ()}
    fused = case.segments["num_q"].astype(np.int64) * case.group_size
    row_end = np.minimum(items["row_begin"] + case.rows, fused[items["segment"]])
    rows, keys = (
        (items["segment"], items["row_begin"], row_end),
        (items["kv_begin"], items["kv_end"]),
    )
    cost = model.of_chunks(case.visibility.visible_tiles(*rows, *keys, case.keys))
    total = np.append(0, np.cumsum(cost))
    assert np.array_equal(plan.loads, np.diff(total[plan.cta_indptr]))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_cutting_is_a_gain(kit: Any, data: st.DataObject) -> None:
    """What partial results cost is less than what they save, for the CTA that has most."""
    case = kit.draw_case(data, fixed=False, stream_k=False)
    plan, model = case.plan(), case.problem().cost_model
    with mock.patch.object(balance, "level", return_value=None):
        uncut = int(case.plan().loads.max(initial=0))
    is_partial = plan.items["slot"] >= 0
    pieces = np.diff(np.append(0, np.cumsum(is_partial))[plan.cta_indptr])
    largest = int((plan.loads + model.partial * pieces).max(initial=0))
    mean = -(-int(plan.loads.sum()) // plan.problem.active_ctas)
    assert largest <= uncut
    if not is_partial.any() and uncut > mean + mean // WORTH_CUTTING:
        event("not worth cutting")
    if is_partial.any():
        event("cut")
        assert largest <= uncut - uncut // WORTH_SAVING


@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "group"),
    [(1024, 8192, 8, 4), (1024, 8192, 16, 1), (2048, 16_384, 16, 1), (1000, 5000, 32, 1)],
)
def test_a_chunk_is_not_cut_to_pieces(
    kit: Any, q_len: int, kv_len: int, heads: int, group: int
) -> None:
    """Of a chunk on an H100 a CTA got 28 pieces, for 8 % of balance, and took twice the time."""
    segments = kit.make_segments([q_len], [kv_len])
    case = kit.case(segments, kit.window(segments, group), heads, group, 128, 128, 132)
    plan = case.plan(section_keys=51_200, piece_keys=PIECE)
    tiles = -(-(plan.items["kv_end"] - plan.items["kv_begin"]) // 128)
    cost = 1 + tiles + 4 * (plan.items["slot"] >= 0)  # in key tiles of 1.7 us
    of_ctas = np.diff(np.append(0, np.cumsum(cost))[plan.cta_indptr])
    assert of_ctas.max() <= 1.15 * max(tiles.sum() / 132, tiles.max())


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stream_k_loads_are_balanced(kit: Any, data: st.DataObject) -> None:
    """No CTA has more than the mean, plus what its two ends moved and what its pieces add."""
    case = kit.draw_case(data, stream_k=True)
    plan, model = case.plan(), case.problem().cost_model
    grid = Grid.of(plan.problem.active_ctas, case.num_kv_heads)
    partial = plan.items["slot"] >= 0
    added = int(partial.sum() - len(plan.merges)) * model.fixed
    line = (int(plan.loads.sum()) - added) // grid.lines
    mean = -(-line // max(1, min(grid.slices, line // model.least_slice)))
    moved = max(mean // SNAP, model.fixed + 2 * model.per_tile * model.grain)
    assert np.all(plan.loads <= mean + 2 * moved + model.fixed + 2 * model.partial)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_plans_are_deterministic(kit: Any, data: st.DataObject) -> None:
    case = kit.draw_case(data)
    first, second = case.plan().sections(), case.plan().sections()
    assert all(np.array_equal(first[name], second[name]) for name in first)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sm_limit_leaves_the_other_ctas_idle(kit: Any, data: st.DataObject) -> None:
    case = kit.draw_case(data)
    limit = data.draw(st.integers(1, case.num_ctas))
    limited = case.plan(sm_limit=limit)
    alone = case.plan(num_ctas=limit, sm_limit=None)
    assert np.array_equal(limited.items, alone.items)
    assert np.array_equal(limited.cta_indptr[: limit + 1], alone.cta_indptr)
    assert np.all(limited.cta_indptr[limit:] == len(alone.items))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_fixed_splits_do_not_depend_on_the_batch(kit: Any, data: st.DataObject) -> None:
    case = kit.draw_case(data, fixed=True)
    if len(case.segments) == 0:
        return
    mask = kit.window(case.segments, case.group_size, 3000, 0, 70)
    plan = case.plan(visibility=mask)
    one = data.draw(st.integers(0, len(case.segments) - 1), label="request")
    own = case.segments[one : one + 1].copy()
    own["batch"] = own["q_row"] = 0
    alone = kit.case(own, kit.window(own, case.group_size, 3000, 0, 70), **case.numbers)
    lonely = alone.plan(num_ctas=data.draw(st.integers(1, 264)))
    assert chunks(plan, one) == chunks(lonely, 0)


def chunks(plan: Any, segment: int) -> list[tuple[int, ...]]:
    """Pieces of one segment with their place in the merge."""
    items = plan.items[plan.items["segment"] == segment]
    place = items["slot"] - np.where(items["merge"] < 0, -1, 0)
    split = items["merge"] >= 0
    place[split] -= plan.merges["first_slot"][items["merge"][split]]
    fields = (items[name] for name in ("kv_head", "row_begin", "kv_begin", "kv_end"))
    return sorted(zip(*(field.tolist() for field in fields), place.tolist(), strict=True))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_element_is_computed_once(kit: Any, data: st.DataObject) -> None:
    """By counting elements, so that verify() itself is checked."""
    q_lens = data.draw(st.lists(st.integers(0, 40), max_size=4))
    kv_lens = [data.draw(st.integers(0, 900)) for _ in q_lens]
    segments = kit.make_segments(q_lens, kv_lens)
    group, left = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([50, 2**40]))
    sinks = data.draw(st.sampled_from([0, 40]))
    mask = kit.window(segments, group, left, 0, sinks)
    split = data.draw(st.sampled_from([None, 64, 256]))
    case = kit.case(segments, mask, 2, group, 16, 32, data.draw(st.integers(1, 40)), None, split)
    plan = case.plan()
    verify(plan, mask)
    for index, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        count = np.zeros((2, q_len * group, kv_len), int)
        written = np.zeros((2, q_len * group), int)
        for item in plan.items[plan.items["segment"] == index]:
            rows = slice(item["row_begin"], item["row_begin"] + 16)
            count[item["kv_head"], rows, item["kv_begin"] : item["kv_end"]] += 1
            first = item["slot"] < 0 or plan.merges["first_slot"][item["merge"]] == item["slot"]
            written[item["kv_head"], rows] += first
        q_pos = (np.arange(q_len * group) // group + kv_len - q_len)[:, None]
        kv_pos = np.arange(kv_len)
        seen = (kv_pos <= q_pos) & ((kv_pos >= q_pos - left) | (kv_pos < sinks))
        assert np.all(written == 1)
        assert count.max(initial=0) <= 1
        assert np.all(count[:, seen] == 1)
