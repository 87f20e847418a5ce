"""Pages are ordered as a reader finds them who steps through the plan with all CTAs at once."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import plan_of

from warploom.scheduler.model.layout import SEGMENT
from warploom.scheduler.model.roles import Role, RolePrices
from warploom.scheduler.model.visibility import AllVisible
from warploom.scheduler.plans.page_order import page_order
from warploom.scheduler.plans.plan import Plan

ROLES: dict[str, Any] = {"smaller": (Role("decode", 4, 32),), "prices": RolePrices((160, 30), 10)}


def queues(plan: Plan) -> list[list[Any]]:
    """What each CTA computes, in turn; CTAs that claim a shared list count as one each."""
    lists = [list(own) for own in np.split(plan.items, plan.cta_indptr[1:-1])]
    if len(plan.problem.roles) == 1:
        return lists
    own = [lists[plan.problem.num_ctas + i] + lists[i] for i in range(plan.problem.num_ctas)]
    shared = [[None] * len(plan.items) + more for more in lists[2 * plan.problem.num_ctas :]]
    return own + shared


def stepped(plan: Plan, size: int) -> list[int]:
    """The definition: round by round, and within one page by page."""
    found: dict[int, None] = {}
    for turn in zip_longest(*queues(plan)):
        pages = []
        for item in filter(lambda item: item is not None, turn):
            begin = int(plan.segments["index_begin"][item["segment"]])
            touched = {key // size for key in range(item["kv_begin"], item["kv_end"])}
            pages.append([int(plan.indices[begin + page]) for page in sorted(touched)])
        for step in zip_longest(*pages):
            found |= dict.fromkeys(page for page in step if page is not None)
    return list(found)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, Any, int, list[int]]:
    """Segments of a paged batch whose requests may share pages, its list of pages, and rows."""
    size = draw(st.sampled_from([1, 3, 16, 100]))
    number = draw(st.integers(1, 6))
    rows = draw(st.lists(st.integers(0, 9), min_size=number, max_size=number))
    keys = draw(st.lists(st.integers(0, 300), min_size=number, max_size=number))
    counts = [-(-n // size) for n in keys]
    pages = draw(st.randoms(use_true_random=False)).choices(range(200), k=sum(counts))
    segments = np.zeros(number, SEGMENT.dtype)
    segments["batch"] = np.arange(number)
    segments["num_q"] = segments["q_len"] = rows
    segments["kv_len"] = segments["kv_count"] = keys
    segments["index_begin"] = np.cumsum([0, *counts[:-1]])
    return segments, np.array(pages, np.int32), size, rows


@pytest.mark.parametrize("more", [{}, {"stream_k": True}, ROLES], ids=["longest", "line", "roles"])
@settings(max_examples=40, deadline=None)
@given(batch=batches(), num_ctas=st.integers(1, 7), num_kv_heads=st.integers(1, 3))
def test_order_and_set(
    more: dict[str, Any], batch: tuple[Any, Any, int, list[int]], num_ctas: int, num_kv_heads: int
) -> None:
    segments, pages, size, rows = batch
    plan = plan_of(
        segments, num_kv_heads=num_kv_heads, group_size=2, rows=16, keys=64, num_ctas=num_ctas,
        visibility=AllVisible(segments), indices=pages, **more,
    )  # fmt: skip
    order = page_order(plan, size).tolist()
    assert order == stepped(plan, size)
    read = set()  # from the page table alone
    for segment, num_rows in zip(segments, rows, strict=True):
        begin, keys = int(segment["index_begin"]), int(segment["kv_len"])
        if num_rows:
            read |= set(pages[begin : begin + -(-keys // size)].tolist())
    assert set(order) == read and len(order) == len(read)
