"""Composed plans: prefixes are found, parts are chosen, and every plan is exact and fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warploom.errors import ArgumentError, CapacityExceeded, PlanInvalid
from warploom.scheduler.composed import planning as composed
from warploom.scheduler.composed import sharing
from warploom.scheduler.composed.plan import ComposedPlan, composed_capacity
from warploom.scheduler.composed.planning import SharedBatch, make_composed_plan, tiles_of_roles
from warploom.scheduler.composed.prefixes import PrefixForest, find_prefixes
from warploom.scheduler.composed.sharing import choose_parts
from warploom.scheduler.composed.verify import verify_composed
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.layout import ROW_CODE, Records
from warploom.scheduler.model.problem import Problem
from warploom.scheduler.model.roles import Role, RolePrices
from warploom.scheduler.model.visibility import AllVisible


@dataclass
class Pages:
    """A page table whose requests share pages."""

    page_size: int
    lists: list[list[int]]
    kv_lens: list[int]

    @property
    def starts(self) -> np.ndarray[Any, Any]:
        return np.cumsum([0, *map(len, self.lists)])[:-1]

    @property
    def indices(self) -> np.ndarray[Any, Any]:
        return np.array([page for pages in self.lists for page in pages], np.int32)

    def forest(self) -> PrefixForest:
        full = np.array(self.kv_lens, np.int64) // self.page_size
        return find_prefixes(self.starts, self.indices, full, self.page_size)


def tree(page_size: int, kv_lens: Any, shared: Any) -> Pages:
    """Request i begins with `shared[i]` = (request before, pages) of an earlier one."""
    lists: list[list[int]] = []
    fresh = 0
    for i, kv_len in enumerate(kv_lens):
        count = -(-kv_len // page_size)
        like, pages = shared[i] if i else (0, 0)
        pages = min(pages, kv_len // page_size, kv_lens[like] // page_size) if i else 0
        own = list(range(fresh, fresh + count - pages))
        fresh += len(own)
        lists.append((lists[like][:pages] if i else []) + own)
    return Pages(page_size, lists, list(kv_lens))


def requests_of(kit: Any, pages: Pages, q_lens: Any) -> Records:
    segments = kit.make_segments(q_lens, pages.kv_lens)
    segments["index_begin"] = pages.starts
    return segments


def draw_pages(data: st.DataObject) -> Pages:
    page_size = data.draw(st.sampled_from([1, 4, 16]), label="page size")
    size = data.draw(st.integers(0, 12), label="requests")
    longest = data.draw(st.sampled_from([20, 400, 6000]), label="longest")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    kv_lens = rng.integers(0, longest + 1, size).tolist()
    shared = [(int(rng.integers(max(i, 1))), int(rng.integers(longest))) for i in range(size)]
    return tree(page_size, kv_lens, shared)


@given(st.data())
def test_prefixes_are_what_page_tables_have_in_common(data: st.DataObject) -> None:
    pages = draw_pages(data)
    forest = pages.forest()
    size = pages.page_size
    for node, parent in enumerate(forest.parent.tolist()):
        assert parent < node
        assert forest.begin[node] == (forest.end[parent] if parent >= 0 else 0)
        assert forest.end[node] > forest.begin[node]
    path: list[list[int]] = []
    for leaf in forest.leaf.tolist():
        path.append([])
        while leaf >= 0:
            path[-1].insert(0, leaf)
            leaf = int(forest.parent[leaf])
    full = [pages.lists[i][: n // size] for i, n in enumerate(pages.kv_lens)]
    for i, mine in enumerate(full):
        common = [0]
        for j, other in enumerate(full):
            if i == j:
                continue
            same = [a == b for a, b in zip(mine, other, strict=False)]
            common.append(same.index(False) if False in same else len(same))
            nodes = [a for a, b in zip(path[i], path[j], strict=False) if a == b]
            assert (forest.end[nodes[-1]] if nodes else 0) == common[-1] * size
        assert (forest.end[path[i][-1]] if path[i] else 0) == max(common) * size
    ones = np.ones(len(full), np.int64)
    assert (forest.sum_over_requests(ones) >= 2).all()
    assert forest.depth == max(map(len, path), default=0)


def shared_for(data: st.DataObject, pages: Pages, requests: Records) -> SharedBatch:
    group = data.draw(st.sampled_from([1, 3, 4, 40]), label="group")
    levels = data.draw(st.integers(1, 4), label="levels")
    return SharedBatch(requests, pages.forest(), group, pages.page_size, levels)


def problem_for(data: st.DataObject, shared: SharedBatch) -> Problem:
    num_ctas = data.draw(st.integers(1, 40), label="CTAs")
    few = st.sampled_from([(), (1, 32), (4, 96), (8, 32), (8, 352), (11, 64)])
    decodes = data.draw(few, label="tile of decodes")
    roles: dict[str, Any] = {}
    if decodes:
        prices = RolePrices((3, 2), saturating=data.draw(st.integers(1, 40), label="saturating"))
        roles = {"smaller": (Role("decode", *decodes),), "prices": prices}
    return Problem(
        shared.requests,
        group_size=shared.group_size,
        visibility=AllVisible(shared.requests),
        num_kv_heads=data.draw(st.sampled_from([1, 3]), label="heads"),
        rows=data.draw(st.sampled_from([12, 16, 64, 255, 256, 257, 384, ROW_CODE]), label="rows"),
        keys=data.draw(st.sampled_from([32, 64]), label="keys"),
        num_ctas=num_ctas,
        active_ctas=data.draw(st.integers(1, num_ctas), label="active"),
        **roles,
    )


@given(st.data(), st.booleans())
def test_every_plan_is_exact_and_fits_its_bounds(
    kit: Any, data: st.DataObject, eager: bool
) -> None:
    pages = draw_pages(data)
    q_lens = data.draw(st.lists(st.sampled_from([0, 1, 7, 20, 129, 600]), min_size=len(pages.lists),
                                max_size=len(pages.lists)), label="q_lens")  # fmt: skip
    requests = requests_of(kit, pages, np.array(q_lens, np.int64))
    shared = shared_for(data, pages, requests)
    problem = problem_for(data, shared)
    left = data.draw(st.sampled_from([2**40, 3000, 50]), label="left")
    masked = data.draw(st.booleans(), label="masked")

    def visibility_of(segments: Records) -> Any:
        if not masked:
            return AllVisible(segments)
        return PartWindow(segments, shared.group_size, left)

    with pytest.MonkeyPatch.context() as patch:
        if eager:  # whatever may be a part is one
            patch.setattr(sharing, "PER_ITEM", 0)
            patch.setattr(sharing, "PER_ROW", 0)
        plan = make_composed_plan(shared, problem, visibility_of, pages.indices)
    verify_composed(plan, requests, visibility_of(requests), pages.page_size)
    counted = tiles_of_roles(shared, problem.roles, visibility_of)
    for number, role in enumerate(problem.roles):
        mine = plan.items[plan.role == number]
        walked = int((-((mine["kv_begin"] - mine["kv_end"]) // role.keys)).sum())
        assert walked == counted[number] * problem.num_kv_heads  # choices are by what is planned
    parts = shared.cut(problem.rows)[1]
    assert parts.levels <= shared.levels
    exact = replace(Bounds.of(requests, len(pages.indices)), max_levels=parts.levels)
    room = composed_capacity(
        exact,
        rows=problem.rows,
        num_kv_heads=problem.num_kv_heads,
        group_size=shared.group_size,
        num_ctas=problem.num_ctas,
        num_roles=len(problem.roles),
    )
    plan.check_fits(room)
    packed = plan.pack(room, np.full(room.total_ints, 7, np.int32))  # counters are cleared, too
    for name, content in plan.sections().items():
        start = room.offsets[name]
        assert np.array_equal(packed[start : start + len(content)], content)


def test_partial_rows_of_one_level_are_those_of_two_tiles_for_each_cta() -> None:
    numbers: dict[str, Any] = {"rows": 128, "num_kv_heads": 8, "group_size": 4, "num_ctas": 132}
    bounds = Bounds(64, 8192, 16384, 65536, max_levels=1)
    assert composed_capacity(bounds, **numbers).max_slots == 2 * 131 * 128
    deeper = composed_capacity(replace(bounds, max_levels=2), **numbers)
    assert deeper.max_slots == 8192 * 4 * 8 * 2 + 131 * 128


@dataclass(frozen=True)
class PartWindow:
    """Causal, and `left` keys back; segments may begin at any position."""

    segments: Records
    group_size: int
    left: int

    def kv_bounds(self, segment: Any, row_begin: Any, row_end: Any) -> Any:
        of = self.segments[segment]
        shift = of["kv_len"].astype(np.int64) - of["q_len"] + of["q_idx"] - of["kv_pos"]
        begin = row_begin // self.group_size + shift - self.left
        end = (row_end - 1) // self.group_size + shift + 1
        return np.clip(begin, 0, of["kv_count"]), np.clip(end, 0, of["kv_count"])

    def visible_tiles(
        self, segment: Any, row_begin: Any, row_end: Any, kv_begin: Any, kv_end: Any, keys: int
    ) -> Any:
        begin, end = self.kv_bounds(segment, row_begin, row_end)
        first = np.maximum((begin - kv_begin) // keys, 0)
        last = -((kv_begin - np.minimum(end, kv_end)) // keys)
        return np.maximum(last - first, 0)


def shared_batch(kit: Any, prefix: int, batch: int, suffix: int = 128) -> tuple[Pages, Records]:
    pages = tree(16, [prefix + suffix] * batch, [(0, prefix // 16)] * batch)
    return pages, requests_of(kit, pages, [1] * batch)


def problem_of(shared: SharedBatch) -> Problem:
    mask = AllVisible(shared.requests)
    return Problem(shared.requests, 8, shared.group_size, 64, 64, 132, 132, mask)


def planned(kit: Any, prefix: int = 8192, batch: int = 64) -> tuple[ComposedPlan, Records]:
    pages, requests = shared_batch(kit, prefix, batch)
    shared = SharedBatch(requests, pages.forest(), 4, 16, levels=2)
    plan = make_composed_plan(shared, problem_of(shared), AllVisible, pages.indices)
    return plan, requests


def test_a_long_prefix_of_many_requests_is_read_by_full_tiles(kit: Any) -> None:
    plan, _ = planned(kit)
    assert [choice.kept for choice in plan.choices] == [True]
    assert plan.segments["kv_count"].tolist() == [8192] + [128] * 64
    shared = plan.items[plan.items["segment"] == 0]
    assert (shared["rows"] == 64).all()  # 16 requests of 4 rows
    assert "in place of 64 save" in str(plan.choices[0])
    # all of the load is partitioned by Stream-K
    assert plan.loads.max() <= 1.1 * plan.loads.mean()


def test_prefixes_are_prefills_and_what_decodes_have_alone_are_decodes(kit: Any) -> None:
    """A chunk of 300 rows and 33 decodes over a prefix of 8192 keys, in tiles of 64 and 8 rows."""
    pages = tree(16, [8192 + 640, *[8192 + 128] * 33], [(0, 512)] * 34)
    requests = requests_of(kit, pages, [300, *[1] * 33])
    shared = SharedBatch(requests, pages.forest(), 4, 16, levels=2)
    decode, prices = (Role("decode", 8, 32),), RolePrices((3, 2), saturating=60)
    problem = replace(problem_of(shared), smaller=decode, prices=prices)
    plan = make_composed_plan(shared, problem, AllVisible, pages.indices)
    verify_composed(plan, requests, AllVisible(requests), 16)
    # The chunk's 19 tiles are full and read all of its keys; decodes read the prefix in two tiles
    # of 64 rows and one of 4, which is a decode's.
    assert tiles_of_roles(shared, problem.roles, AllVisible) == [19 * 138 + 2 * 128, 33 * 4 + 256]
    prefill, own = plan.work_of_roles()
    assert (prefill.role.name, prefill.segments) == ("prefill", 2)
    assert (own.role.name, own.segments) == ("decode", 34)
    assert plan.balance < 1.2
    of_prefix = plan.items[plan.items["segment"] == 0]
    begin = of_prefix[(of_prefix["kv_head"] == 0) & (of_prefix["kv_begin"] == 0)]
    assert sorted(begin["rows"].tolist()) == [4, 64, 64]  # no row of the chunk


def test_large_requests_share_tiles_with_small_ones_that_fit(kit: Any) -> None:
    """Neighbours of 36 rows and of 4: with 7 of these a tile of 64 is full."""
    pages, _ = shared_batch(kit, 8192, 64)
    requests = requests_of(kit, pages, [9, *[1] * 7] * 8)
    shared = SharedBatch(requests, pages.forest(), 4, 16, levels=2)
    keys, walked, tiles = shared.reads(64)
    assert (keys, walked) == (8192 + 64 * 128, 8 * 8192 + 64 * 128)
    assert tiles == 8 + 64


def test_keys_count_once_however_many_fill_tiles_alone(kit: Any) -> None:
    pages, _ = shared_batch(kit, 8192, 4)
    requests = requests_of(kit, pages, [100] * 4)
    shared = SharedBatch(requests, pages.forest(), 4, 16, levels=2)
    assert shared.reads(64) == (8192 + 4 * 128, 4 * 7 * (8192 + 128), 4 * 7)


def test_rows_that_fill_tiles_alone_merge_nothing(kit: Any) -> None:
    pages, _ = shared_batch(kit, 8192, 8)
    requests = requests_of(kit, pages, [100] * 8)
    shared = SharedBatch(requests, pages.forest(), 4, 16, levels=2)
    plan = make_composed_plan(shared, problem_of(shared), AllVisible, pages.indices)
    verify_composed(plan, requests, AllVisible(requests), 16)
    assert [str(choice) for choice in plan.choices] == [
        "8192 keys: read by each request, since those with them fill tiles alone"
    ]
    assert len(plan.segments) == 8
    assert shared.cut(64)[1].levels == 1  # so that partial rows have no room for a second


def test_what_tiles_make_of_a_batch_is_worked_out_once(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, requests = shared_batch(kit, 8192, 64)
    shared = SharedBatch(requests, pages.forest(), 4, 16, levels=2)
    keys, walked, tiles = shared.reads(64)
    assert (keys, walked, tiles) == (8192 + 64 * 128, 4 * 8192 + 64 * 128, 4 + 64)
    monkeypatch.setattr(composed, "choose_parts", None)
    plan = make_composed_plan(shared, problem_of(shared), AllVisible, pages.indices)
    assert len(plan.segments) == 1 + 64


def test_a_short_prefix_is_read_by_each_request(kit: Any) -> None:
    plan, _ = planned(kit, prefix=16)
    assert [choice.kept for choice in plan.choices] == [False]
    assert "read with what follows" in str(plan.choices[0])
    assert len(plan.segments) == 64
    assert plan.num_slots == 0


def test_what_waits_for_a_part_counts(kit: Any) -> None:
    """A chain of prefixes, none of them worth a part, but worth one together."""
    forest = PrefixForest(
        parent=np.array([-1, 0, 1]),
        begin=np.array([0, 16, 32]),
        end=np.array([16, 32, 48]),
        first=np.zeros(3, np.int64),
        leaf=np.array([0, 1] + [2] * 30),
    )
    one, rows = np.ones(32, np.int64), np.full(32, 4)
    assert choose_parts(forest, one, rows, 64, 9)[0].tolist() == [False, True, False]
    assert not choose_parts(forest, one, rows, 64, 1)[0].any()


def test_levels_limit_the_parts_of_a_request(kit: Any) -> None:
    pages = tree(16, [4000] * 8, [(0, 0)] + [(0, 100)] * 3 + [(0, 50)] * 4)
    requests = requests_of(kit, pages, [1] * 8)
    for levels, parts in ((1, 0), (2, 1), (3, 2)):
        shared = SharedBatch(requests, pages.forest(), 4, 16, levels)
        plan = make_composed_plan(shared, problem_of(shared), AllVisible, pages.indices)
        assert len(plan.segments) - 8 == parts
        verify_composed(plan, requests, AllVisible(requests), 16)


def test_capacity_is_exceeded_with_both_numbers(kit: Any) -> None:
    plan, _ = planned(kit)
    numbers = {"rows": 64, "num_kv_heads": 8, "group_size": 4, "num_ctas": 132}
    small = composed_capacity(Bounds(8, 8, 9000, 5000), **numbers)
    with pytest.raises(CapacityExceeded, match="units"):
        plan.check_fits(small)


def damage(plan: ComposedPlan) -> ComposedPlan:
    names = ("items", "row_merges", "units", "packed_rows", "contributions", "segments", "header")
    return replace(plan, **{name: getattr(plan, name).copy() for name in names})


DAMAGE = {
    "segments 0 kv_count": lambda p: p.segments["kv_count"].__setitem__(0, 8176),
    "segments 5 index_begin": lambda p: p.segments["index_begin"].__setitem__(5, 0),
    "items kv_begin": lambda p: p.items["kv_begin"].__setitem__(np.argmax(p.items["kv_begin"]), 0),
    "items kv_end": lambda p: p.items["kv_end"].__setitem__(3, p.items["kv_end"][3] - 64),
    "items slot": lambda p: p.items["slot"].__setitem__(3, p.items["slot"][4]),
    "items direct": lambda p: p.items["slot"].__setitem__(3, -1),
    "items head": lambda p: p.items["kv_head"].__setitem__(0, (p.items["kv_head"][0] + 1) % 8),
    "items rows": lambda p: p.items["rows"].__setitem__(0, p.items["rows"][0] - 1),
    "units q_row": lambda p: p.units["q_row"].__setitem__(7, 8),
    "units q_pos": lambda p: p.units["q_pos"].__setitem__(7, 0),
    "units kv_len": lambda p: p.units["kv_len"].__setitem__(7, 9000),
    "packed rows": lambda p: p.packed_rows.__setitem__(1, p.packed_rows[1] + 1),
    "packed units": lambda p: p.packed_rows.__setitem__(slice(0, 4), p.packed_rows[:4] + ROW_CODE),
    "contributions": lambda p: p.contributions.__setitem__(1, p.contributions[0]),
    "order": lambda p: p.contributions.__setitem__(slice(0, 2), p.contributions[1::-1].copy()),
    "row_merges": lambda p: p.row_merges["count"].__setitem__(0, 1),
    "merge rows": lambda p: p.row_merges["row"].__setitem__(0, 1),
    "merge heads": lambda p: p.row_merges["kv_head"].__setitem__(0, 1),
    "header": lambda p: p.header["num_slots"].__setitem__(0, 1),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_verify_sees_damage(kit: Any, name: str) -> None:
    plan, requests = planned(kit)
    verify_composed(plan, requests, AllVisible(requests), 16)
    broken = damage(plan)
    DAMAGE[name](broken)
    with pytest.raises(PlanInvalid):
        verify_composed(broken, requests, AllVisible(requests), 16)


def test_rows_have_the_codes_that_kernels_read() -> None:
    text = Path(__file__).parents[2] / "templates" / "common" / "warploom" / "variant_base.hpp"
    assert f"constexpr int kRowCode = {ROW_CODE};" in text.read_text()


def test_a_tile_with_rows_that_have_no_code_is_refused(kit: Any) -> None:
    pages, requests = shared_batch(kit, 16, 2)
    shared = SharedBatch(requests, pages.forest(), 4, 16, levels=2)
    problem = replace(problem_of(shared), rows=ROW_CODE + 1)
    with pytest.raises(ArgumentError, match=f"rows: is {ROW_CODE + 1}; expected 1 to {ROW_CODE}"):
        make_composed_plan(shared, problem, AllVisible, pages.indices)
    last = (composed.MAX_UNITS - 1) * ROW_CODE + ROW_CODE - 1
    assert last == np.iinfo(np.int32).max
