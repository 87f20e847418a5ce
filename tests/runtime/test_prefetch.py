"""`AttentionWrapper.prefetch`: which pages it asks for, after which plan, and what it refuses."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from support.holds import FakeHold, destroy_graphs
from support.parts import page_tables

import warploom as wl
from warploom.errors import (
    ArgumentError,
    ForbiddenUnderCapture,
    NotPlanned,
    WrongDevice,
    WrongShape,
)
from warploom.prefetch_errors import BadBudget, BudgetTooSmall, CannotPrefetch, HasGaps
from warploom.runtime.devices import graph_hold
from warploom.runtime.launching.prefetch import SpanTable
from warploom.runtime.tensors import unmapped
from warploom.runtime.wrappers import prefetching

PAGE, HEADS, DIM, PAGES = 4, 2, 8, 40
BYTES = 2 * PAGE * HEADS * DIM * 4  # of a page's keys and values


def wrapper(**options: Any) -> wl.AttentionWrapper:
    declared: dict[str, Any] = {
        "kv_format": wl.Paged(PAGE), "num_q_heads": 4, "num_kv_heads": HEADS, "head_dim": DIM,
        "dtype": "float32", "device": "cpu",
    }  # fmt: skip
    return wl.AttentionWrapper(options.pop("variant", None), **(declared | options))


def table(lens: list[int], pages: Any) -> tuple[Any, ...]:
    counts = [-(-n // PAGE) for n in lens]
    indptr = np.cumsum([0, *counts])
    return indptr, pages[: indptr[-1]], [(n - 1) % PAGE + 1 for n in lens]


def last_table(attention: wl.AttentionWrapper) -> SpanTable:
    return page_tables(attention)[-1].table


def asked(attention: wl.AttentionWrapper) -> tuple[list[int], list[int]]:
    """Pages of keys and of values in the kernel's table, in its order."""
    records = last_table(attention).read()
    pages = records["offset"] * 2 // BYTES  # a page is less than what one instruction asks for
    assert (records["bytes"] == BYTES // 2).all()
    return pages[records["source"] == 0].tolist(), pages[records["source"] == 1].tolist()


@contextmanager
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(prefetching, "is_capturing", lambda device: True)
        yield


@pytest.fixture(autouse=True)
def holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_hold, "GraphHold", FakeHold)


@pytest.fixture
def cache() -> torch.Tensor:
    return torch.randn(2, PAGES, PAGE, HEADS, DIM)


def test_pages_of_the_batch_once_and_under_the_budget(cache: torch.Tensor) -> None:
    attention = wrapper(sm_limit=3)
    lens, pages = [9, 30, 1, 17], np.random.default_rng(0).permutation(PAGES)
    attention.plan([0, 1, 2, 3, 9], *table(lens, pages))
    q = torch.randn(9, 4, DIM)
    before = attention.run(q, tuple(cache))
    read = pages[: sum(-(-n // PAGE) for n in lens)].tolist()
    assert attention.prefetch(tuple(cache), 1 << 20) == BYTES * len(read)
    keys, values = asked(attention)
    assert keys == values and sorted(keys) == sorted(read)
    assert attention.prefetch(tuple(cache), 3 * BYTES + 5) == 3 * BYTES
    assert asked(attention)[0] == keys[:3]
    assert torch.equal(attention.run(q, tuple(cache)), before)


def test_shared_pages_come_once(cache: torch.Tensor) -> None:
    attention = wrapper(kv_format=wl.Composed(PAGE), variant=wl.Causal())
    pages = np.array([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 9])
    attention.plan([0, 1, 2], [0, 6, 12], pages, [2, 3])
    attention.prefetch(tuple(cache), 1 << 20)
    assert sorted(asked(attention)[0]) == [0, 1, 2, 3, 4, 5, 9]


def test_a_window_reads_the_last_tile_of_keys(cache: torch.Tensor) -> None:
    attention = wrapper(variant=wl.Causal() & wl.SlidingWindow(7), tile=wl.TileConfig(8, 64, 1, 1))
    pages = np.arange(PAGES)
    attention.plan([0, 1], [0, 20], pages[:20], [4])
    attention.prefetch(tuple(cache), 1 << 20)
    assert sorted(asked(attention)[0]) == [16, 17, 18, 19]


def test_each_plan_writes_its_pages_where_a_captured_launch_reads(cache: torch.Tensor) -> None:
    bounds = wl.Bounds(max_requests=4, max_q_rows=8, max_kv_len=100, max_blocks=30)
    attention = wrapper(bounds=bounds, cuda_graph=True)
    attention.plan([0, 1], *table([5], np.array([7, 3])))
    attention.prefetch(tuple(cache), 1 << 20)
    address = last_table(attention).address
    assert sorted(asked(attention)[0]) == [3, 7]
    attention.plan([0, 1, 2], *table([50, 9], np.arange(16)))
    assert sorted(asked(attention)[0]) == list(range(16))
    attention.prefetch(tuple(cache), 1 << 20)
    assert last_table(attention).address == address


def test_layouts_and_budgets_have_tables_that_stay_and_follow_plans(
    cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = torch.randn(PAGES, 2, PAGE, HEADS, DIM)
    calls: list[tuple[Any, int]] = [(tuple(cache), 1 << 20), (joint, 1 << 20), (joint, 2 * BYTES)]
    bounds = wl.Bounds(max_requests=4, max_q_rows=8, max_kv_len=100, max_blocks=30)
    attention = wrapper(bounds=bounds, cuda_graph=True)
    attention.plan([0, 1], *table([5], np.array([7, 3])))
    for call in calls:
        attention.prefetch(*call)
    tables = [pages.table for pages in page_tables(attention)]
    attention.plan([0, 1, 2], *table([50, 9], np.arange(16)))
    assert [len(x.read()) for x in tables] == [32, 32, 4]
    monkeypatch.setattr(prefetching, "_of_graphs", kept := graph_hold.KeptForGraphs[SpanTable]())
    with capturing(monkeypatch):
        for call in calls[:2]:
            attention.prefetch(*call)
        with pytest.raises(ForbiddenUnderCapture, match="before the capture"):
            attention.prefetch(joint, 3 * BYTES)
    assert list(kept) == tables[:2]
    assert [pages.table for pages in page_tables(attention)] == tables


def test_what_a_graph_reads_outlives_larger_tables_and_the_wrapper(
    cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetching, "_of_graphs", kept := graph_hold.KeptForGraphs[SpanTable]())
    attention = wrapper()
    attention.plan([0, 1], *table([5], np.arange(2)))
    attention.prefetch(tuple(cache), 1 << 20)
    with capturing(monkeypatch):
        attention.prefetch(tuple(cache), 1 << 20)
    captured = ref(last_table(attention))
    attention.plan([0, 1], *table([80], np.arange(20)))
    attention.prefetch(tuple(cache), 1 << 20)
    larger = ref(last_table(attention))
    assert larger() is not captured()
    del attention
    gc.collect()
    assert captured() is not None and larger() is None
    destroy_graphs(kept)
    other = wrapper()
    other.plan([0, 1], *table([5], np.arange(2)))
    other.prefetch(tuple(cache), 1 << 20)
    with capturing(monkeypatch):
        other.prefetch(tuple(cache), 1 << 20)
        other.prefetch(tuple(cache), 1 << 20)
    assert captured() is None and list(kept) == [last_table(other)]


def test_another_budget_and_joint_caches(cache: torch.Tensor) -> None:
    joint = torch.randn(PAGES, 2, PAGE, HEADS, DIM)
    attention = wrapper()
    attention.plan([0, 1], *table([20], np.arange(5)))
    attention.prefetch(tuple(cache), 2 * BYTES)
    assert attention.prefetch(joint, 1 << 20) == 5 * BYTES
    records = last_table(attention).read()
    assert (records["offset"][records["source"] == 1] // BYTES).tolist() == asked_order(attention)


def asked_order(attention: wl.AttentionWrapper) -> list[int]:
    from warploom.scheduler.plans.page_order import page_order

    assert attention.planned is not None
    order: list[int] = page_order(attention.planned.plan, PAGE).tolist()
    return order


def test_refusals(cache: torch.Tensor) -> None:
    attention = wrapper()
    with pytest.raises(NotPlanned):
        attention.prefetch(tuple(cache), 1 << 20)
    attention.plan([0, 1], *table([20], np.arange(5)))
    for wrong in (-1, 1.5, True, "1", None):
        with pytest.raises(BadBudget):
            attention.prefetch(tuple(cache), wrong)  # type: ignore[arg-type]
    with pytest.raises(BudgetTooSmall, match=str(BYTES)):
        attention.prefetch(tuple(cache), BYTES - 1)
    with pytest.raises(ArgumentError, match="sms"):
        attention.prefetch(tuple(cache), BYTES, sms=0)
    with pytest.raises(HasGaps):
        wide = torch.randn(2, PAGES, PAGE, HEADS, 2 * DIM)[..., :DIM]
        attention.prefetch(tuple(wide), BYTES)
    with pytest.raises(WrongShape):
        attention.prefetch(tuple(cache[:, :, :2]), BYTES)
    with pytest.raises(WrongDevice):
        attention.prefetch(tuple(cache.to("meta")), BYTES)


def test_formats_without_known_pages() -> None:
    ragged = wrapper(kv_format=wl.Ragged())
    ragged.plan([0, 1], [0, 20])
    with pytest.raises(CannotPrefetch, match="no pages"):
        ragged.prefetch(tuple(torch.randn(2, 20, HEADS, DIM)), 1 << 20)
    reading = wrapper(backend="reference")
    reading.plan([0, 1], *table([20], np.arange(5)))
    with pytest.raises(CannotPrefetch, match="reference"):
        reading.prefetch(tuple(torch.randn(2, PAGES, PAGE, HEADS, DIM)), 1 << 20)
    selecting = wl.PageSelectionWrapper(
        kv_format=wl.Paged(PAGE), num_q_heads=4, num_kv_heads=HEADS, head_dim=DIM,
        dtype="float32", device="cpu",
    )  # fmt: skip
    selection = torch.arange(2 * HEADS, dtype=torch.int32).view(1, HEADS, 2)
    selecting.plan([0, 1], [0, 2], selection, [4])
    with pytest.raises(CannotPrefetch, match="selection"):
        selecting.prefetch(tuple(torch.randn(2, PAGES, PAGE, HEADS, DIM)), 1 << 20)


def test_virtual_caches_have_memory_in_small_pages_alone() -> None:
    sizes: dict[str, Any] = {
        "num_kv_heads": HEADS, "head_dim": DIM, "dtype": "float32", "max_requests": 2,
        "max_tokens": 1000,
    }  # fmt: skip
    known = set(unmapped._ranges)
    with wl.MemoryPool(64 * 4096, "cpu", page_bytes=4096) as pool:
        for page_size, is_mapped in ((None, False), (128, True)):
            with wl.VirtualCache(pool, **sizes, page_size=page_size) as virtual:
                virtual.reserve("a", 140)
                virtual.grow("a", 140)
                attention = wrapper(kv_format=virtual.kv_format)
                attention.plan([0, 1], **virtual.tables(["a"]))
                if is_mapped and page_size is not None:
                    pages = -(-140 // page_size)
                    asked_for = pages * page_size * BYTES // PAGE
                    assert attention.prefetch(virtual.kv(), 1 << 20) == asked_for
                    for page in virtual.tables(["a"])["kv_indices"]:
                        virtual.kv()[0][page].sum()  # ends the process if there is no memory
                    continue
                with pytest.raises(CannotPrefetch, match="VirtualCache"):
                    attention.prefetch(virtual.kv(), 1 << 20)
    del virtual, attention
    gc.collect()
    assert unmapped._ranges.keys() <= known
