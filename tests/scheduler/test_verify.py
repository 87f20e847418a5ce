"""verify() sees every kind of damage: a sound plan is corrupted in one place at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.problems import of_problem

from warploom.errors import PlanInvalid
from warploom.scheduler.model.visibility import AllVisible
from warploom.scheduler.plans.plan import Plan
from warploom.scheduler.plans.verify import verify


@pytest.fixture(params=[None, 512])
def case(kit: Any, request: pytest.FixtureRequest) -> Any:
    """Split tiles, whole tiles and a tile without keys; balanced or with fixed splits."""
    segments = kit.make_segments([1, 9, 3, 0, 70], [40_000, 900, 0, 50, 300])
    mask = kit.window(segments, 4, 20_000, 0, 100)
    return kit.case(segments, mask, 2, 4, 16, 64, 24, 20, request.param)


def damaged(plan: Plan) -> Plan:
    """A copy whose arrays may be changed."""
    names = ("header", "cta_indptr", "items", "segments", "merges", "loads")
    return replace(plan, **{name: getattr(plan, name).copy() for name in names})


def change(field: str, pick: Callable[[Plan], int], step: int) -> Callable[[Plan], None]:
    def apply(plan: Plan) -> None:
        plan.items[field][pick(plan)] += step

    return apply


def partial(plan: Plan) -> int:
    return int(np.flatnonzero((plan.items["slot"] >= 0) & (plan.items["kv_begin"] > 0))[0])


def whole(plan: Plan) -> int:
    return int(np.flatnonzero((plan.items["slot"] < 0) & (plan.items["kv_end"] > 200))[0])


def empty(plan: Plan) -> int:
    return int(np.flatnonzero(plan.items["kv_end"] == 0)[0])


def first_part(plan: Plan) -> int:
    return int(np.flatnonzero((plan.items["slot"] >= 0) & (plan.items["kv_begin"] == 0))[0])


def swap_slots(plan: Plan) -> None:
    a, b = np.flatnonzero(plan.items["merge"] == 0)[:2]
    plan.items["slot"][[a, b]] = plan.items["slot"][[b, a]]


def swap_merges(plan: Plan) -> None:
    items = plan.items["merge"]
    plan.items["merge"] = np.where(items == 0, 1, np.where(items == 1, 0, items))


def duplicate(plan: Plan) -> None:
    plan.items[whole(plan)] = plan.items[partial(plan)]


def repeat_a_whole_tile(plan: Plan) -> None:
    tiles = np.flatnonzero(plan.items["slot"] < 0)
    plan.items[tiles[0]] = plan.items[tiles[1]]


def late_partial(plan: Plan) -> None:
    """A whole item before a partial one of the same CTA."""
    cta = np.searchsorted(plan.cta_indptr, np.arange(len(plan.items)), side="right")
    border = (plan.items["slot"][:-1] >= 0) & (plan.items["slot"][1:] < 0) & (cta[:-1] == cta[1:])
    at = int(np.flatnonzero(border)[0])
    plan.items[[at, at + 1]] = plan.items[[at + 1, at]]


def header(field: str) -> Callable[[Plan], None]:
    def apply(plan: Plan) -> None:
        plan.header[field] += 1

    return apply


def indptr(index: int, value: int) -> Callable[[Plan], None]:
    def apply(plan: Plan) -> None:
        plan.cta_indptr[index] = value

    return apply


def merge(field: str, step: int) -> Callable[[Plan], None]:
    def apply(plan: Plan) -> None:
        plan.merges[field][-1] += step

    return apply


def count_a_merge_twice(plan: Plan) -> None:
    """Numbers that agree in sum but not one by one."""
    plan.merges["num_slots"][0] += 1
    plan.merges["num_slots"][1] -= 1


def set_keys(pick: Callable[[Plan], int], begin: int, end: int) -> Callable[[Plan], None]:
    def apply(plan: Plan) -> None:
        at = pick(plan)
        plan.items["kv_begin"][at], plan.items["kv_end"][at] = begin, end

    return apply


def empty_part(plan: Plan) -> None:
    at = partial(plan)
    plan.items["kv_end"][at] = plan.items["kv_begin"][at]


def shift_last_merge(step: int) -> Callable[[Plan], None]:
    """Moves a merge and its parts together to other slots."""

    def apply(plan: Plan) -> None:
        plan.merges["first_slot"][-1] += step
        plan.items["slot"][plan.items["merge"] == len(plan.merges) - 1] += step

    return apply


DAMAGE: dict[str, tuple[Callable[[Plan], None], str]] = {
    "keys lost at the end": (change("kv_end", whole, -64), "visible keys after"),
    "keys lost at the start": (change("kv_begin", first_part, 64), "visible keys before"),
    "keys lost between parts": (change("kv_begin", partial, 64), "visible keys before"),
    "keys seen twice": (change("kv_begin", partial, -64), "share keys|crosses a fixed split"),
    "keys off the tile": (change("kv_begin", partial, 1), "do not begin at a tile"),
    "end within a tile": (change("kv_end", first_part, -1), "ends within a key tile"),
    "keys outside the list": (change("kv_end", whole, 10**6), "outside its segment's list"),
    "keys for an empty tile": (change("kv_end", empty, 1), "outside its segment's list"),
    "rows off the tile": (change("row_begin", whole, 1), "rows do not begin at a tile"),
    "rows past the end": (change("row_begin", whole, 1600), "has no rows"),
    "another tile's rows": (change("row_begin", partial, 16), "has no rows|share keys"),
    "unknown segment": (change("segment", whole, 100), "has no segment"),
    "negative segment": (change("segment", whole, -100), "has no segment"),
    "unknown head": (change("kv_head", whole, 2), "has no head"),
    "other head": (change("kv_head", empty, 1), "no item|share keys|has no head"),
    "rows": (change("rows", whole, 1), "names its rows"),
    "slot of a whole tile": (change("slot", whole, 1), "whole tile has a slot"),
    "merge of a whole tile": (change("merge", whole, 1), "whole tile has a slot"),
    "slot off by one": (change("slot", partial, 1), "do not ascend"),
    "unknown merge": (change("merge", partial, 1000), "has no merge"),
    "no merge": (change("merge", partial, -1000), "has no merge"),
    "slots swapped": (swap_slots, "do not ascend"),
    "merges swapped": (swap_merges, "do not ascend|miscounts its parts"),
    "item overwritten": (duplicate, "has no item"),
    "tile twice": (repeat_a_whole_tile, "has no item"),
    "partial item late": (late_partial, "comes after a whole one"),
    "header items": (header("num_items"), "miscounts the items"),
    "header segments": (header("num_segments"), "miscounts the segments"),
    "header merges": (header("num_merges"), "miscounts the merges"),
    "header slots": (header("num_slots"), "miscounts the slots"),
    "indptr start": (indptr(0, 1), "does not begin at 0"),
    "indptr end": (indptr(-1, 1), "decreases"),
    "indptr order": (indptr(3, 10**6), "decreases"),
    "work above the limit": (indptr(20, 0), "decreases|above the SM limit"),
    "merge slots": (merge("num_slots", 1), "miscounts"),
    "merge first slot": (merge("first_slot", -1), "do not ascend"),
    "keys backwards": (set_keys(whole, 128, 64), "end before they begin"),
    "visible tile without keys": (set_keys(whole, 0, 0), "stands for visible ones"),
    "part without keys": (empty_part, "not its tile's only one"),
    "slots past the end": (shift_last_merge(1), "slot is out of range"),
    "slots shared": (shift_last_merge(-1), "share a slot"),
    "merges disagree": (count_a_merge_twice, "miscounts its parts"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(case: Any, name: str) -> None:
    apply, reason = DAMAGE[name]
    plan = damaged(case.plan())
    verify(plan, case.visibility)
    apply(plan)
    with pytest.raises(PlanInvalid, match=reason):
        verify(plan, case.visibility)


def test_an_idle_cta_must_stay_idle(case: Any) -> None:
    plan = damaged(case.plan())
    plan.cta_indptr[20] -= 1
    with pytest.raises(PlanInvalid, match="above the SM limit"):
        verify(plan, case.visibility)


LENGTHS: dict[str, tuple[Callable[[Plan], dict[str, Any]], str]] = {
    "two headers": (lambda p: {"header": np.tile(p.header, 2)}, "exactly one header"),
    "short indptr": (lambda p: {"cta_indptr": p.cta_indptr[:-1]}, "not an entry for each list"),
    "early end": (
        lambda p: {"cta_indptr": np.minimum(p.cta_indptr, len(p.items) - 1)},
        "does not end at the item count",
    ),
    "short loads": (lambda p: {"loads": p.loads[1:]}, "loads do not count"),
    "fewer items": (lambda p: {"items": p.items[:-1]}, "miscounts the items"),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_wrong_lengths_are_found(case: Any, name: str) -> None:
    changes, reason = LENGTHS[name]
    plan = case.plan()
    with pytest.raises(PlanInvalid, match=reason):
        verify(replace(plan, **changes(plan)), case.visibility)


def test_a_merge_without_a_tile_is_found(case: Any) -> None:
    plan = damaged(case.plan())
    plan.header["num_merges"] += 1
    merges = np.append(plan.merges, np.zeros(1, plan.merges.dtype))
    with pytest.raises(PlanInvalid, match="a merge has no tile"):
        verify(replace(plan, merges=merges), case.visibility)


def test_a_plan_for_another_mask_is_refused(case: Any) -> None:
    """A window's plan leaves out keys that a plan without mask must have."""
    with pytest.raises(PlanInvalid, match="visible keys"):
        verify(case.plan(), AllVisible(case.segments))


def test_an_item_across_a_fixed_split_is_found(kit: Any) -> None:
    segments = kit.make_segments([1], [2048])
    case = kit.case(segments, AllVisible(segments), split_size=1024)
    plan = of_problem(case.plan(split_size=None, num_ctas=1), split_size=1024)
    with pytest.raises(PlanInvalid, match="crosses a fixed split"):
        verify(plan, case.visibility)


def test_too_many_slots_are_found(kit: Any) -> None:
    """Many fixed splits claimed to be a balanced plan."""
    segments = kit.make_segments([1], [4096])
    case = kit.case(segments, AllVisible(segments), num_ctas=2, split_size=128)
    with pytest.raises(PlanInvalid, match="more than two partial slots per boundary"):
        verify(of_problem(case.plan(), split_size=None), case.visibility)
