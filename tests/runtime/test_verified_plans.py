"""`WARPLOOM_VERIFY_PLANS=1`: a plan with a mistake never gets to `run`, whoever planned."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import compiled

import warploom as wl
from warploom.errors import NotPlanned, PlanInvalid
from warploom.runtime.planning import composed, rules
from warploom.runtime.strategies import numpy_strategy, size_classes
from warploom.runtime.strategies.host_planner import HostPlanner
from warploom.scheduler.model.layout import HEADER, WORK_ITEM

SHAPE: dict[str, Any] = {
    "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": "float32", "device": "cpu"
}  # fmt: skip
PAGES = {"kv_indices": np.tile(np.arange(60), 3), "last_page_len": [16, 16, 16]}


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_VERIFY_PLANS", "1")


def plan(kv_format: Any, **options: Any) -> wl.AttentionWrapper:
    """One request of few rows, one of many, and one that shares the pages of both."""
    attention = wl.AttentionWrapper(wl.Causal(), kv_format=kv_format, **SHAPE, **options)
    rest = PAGES if kv_format.block_kv else {}
    attention.plan([0, 1, 701, 703], np.arange(4) * (60 if rest else 900), **rest)
    return attention


def drop_keys(made: Any) -> Any:
    """The plan with a key tile less in its longest item."""
    items = made.items.copy()
    items["kv_end"][np.argmax(items["kv_end"] - items["kv_begin"])] -= made.problem.keys
    return replace(made, items=items)


@pytest.mark.parametrize(
    "kv_format", [wl.Ragged(), wl.Paged(16), wl.Composed(16)], ids=lambda one: type(one).__name__
)
def test_a_plan_that_leaves_keys_out_is_refused_with_its_batch(
    kv_format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(kv_format, batch_invariant=kv_format.composed is False)  # sound ones pass
    for module, name in ((rules, "make_plan"), (composed, "make_composed_plan")):
        made = getattr(module, name)
        monkeypatch.setattr(module, name, _damaging(made, drop_keys))
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=kv_format, batch_invariant=kv_format.composed is False, **SHAPE
    )
    rest = PAGES if kv_format.block_kv else {}
    expected = (
        r"visible keys.* belong to no item .*planned by NumPy.*num_q=\[.*700.*bug of warploom"
    )
    with pytest.raises(PlanInvalid, match=expected):
        attention.plan([0, 1, 701, 703], np.arange(4) * (60 if rest else 900), **rest)
    with pytest.raises(NotPlanned):
        attention.run(torch.randn(703, 4, 32), torch.randn(60, 2, 16, 2, 32))


def _damaging(make: Callable[..., Any], damage: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *given, **named: damage(make(*given, **named))


def shorten_an_item(ints: Any, room: Any) -> None:
    at = room.offsets["items"] + [name for name, _ in WORK_ITEM.fields].index("kv_end")
    ints[at] -= 1


def count_too_many(ints: Any, room: Any) -> None:
    ints[[name for name, _ in HEADER.fields].index("num_items")] = room.max_items + 1


def lose_an_opening(ints: Any, room: Any) -> None:
    ints[room.offsets["openings"]] += 1


def change_a_length(ints: Any, room: Any) -> None:
    ints[room.offsets["segments"]] += 1


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (shorten_an_item, "belong to no item|within a key tile"),
        (count_too_many, "the header counts"),
        (lose_an_opening, "memory does not hold its openings"),
        (change_a_length, "its segments are not the batch's"),
    ],
)
def test_what_a_native_planner_wrote_is_read_back_and_checked(
    damage: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = wl.AttentionWrapper(kv_format=wl.Paged(16), **SHAPE)
    given = ([0, 1, 2, 3], [0, 60, 120, 180]), PAGES
    attention.plan(*given[0], **given[1])
    assert attention.planned is not None
    assert attention.planned.by == "the host, natively"
    on_host = HostPlanner.plan

    def wrong(self: Any, inputs: Any, site: Any, address: int) -> None:
        on_host(self, inputs, site, address)
        damage(compiled(attention).workspace.plan_ints.numpy(), site.room)

    monkeypatch.setattr(HostPlanner, "plan", wrong)
    with pytest.raises(PlanInvalid, match=expected):
        attention.plan(*given[0], **given[1])


def test_selections_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = wl.PageSelectionWrapper(kv_format=wl.Paged(16), **SHAPE)
    selection = torch.zeros(2, 2, 50, dtype=torch.int32)
    attention.plan([0, 1, 2], [0, 50, 53], selection, [16, 5])
    monkeypatch.setattr(rules, "make_plan", _damaging(rules.make_plan, drop_keys))
    with pytest.raises(PlanInvalid, match="planned by NumPy"):
        attention.plan([0, 1, 2], [0, 50, 53], selection, [16, 5])


def test_nothing_is_checked_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARPLOOM_VERIFY_PLANS")
    for module in (size_classes, numpy_strategy):
        monkeypatch.setattr(module, "verify_planned", None)
    for kv_format in (wl.Ragged(), wl.Paged(16), wl.Composed(16)):
        plan(kv_format)


def test_plans_of_many_items_are_checked_soon() -> None:
    requests, rows = 4000, 600
    attention = wl.AttentionWrapper(wl.SlidingWindow(300), kv_format=wl.Ragged(), **SHAPE)
    ends = np.arange(requests + 1)
    began = time.perf_counter()
    attention.plan(ends * rows, ends * 8000)
    assert attention.planned is not None
    assert len(attention.planned.plan.items) > 25_000
    assert time.perf_counter() - began < 60
