"""Calls of virtual caches and pools whose driver refuses to unmap or to give back a page."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.virtual_caches import PAGE, SHAPE

import warploom as wl
from warploom.memory_errors import BudgetTooLarge, MemoryClosed, PageFailed
from warploom.serving.virtual_memory import host_driver
from warploom.serving.virtual_memory import pool as pools

Refuse = Callable[[str, Callable[[int], bool]], None]


@pytest.fixture
def pool() -> Iterator[wl.MemoryPool]:
    with wl.MemoryPool(64 * PAGE, "cpu", page_bytes=PAGE) as made:
        yield made


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Let the system refuse those calls of a kind ("map" or "unmap") whose number is told."""

    def refuse(kind: str, which: Callable[[int], bool]) -> None:
        original, count = host_driver._mmap, 0

        def refusing(address: int | None, size: int, access: int, *rest: int) -> int:
            nonlocal count
            if address is not None and kind == ("map" if access else "unmap"):
                count += 1
                if which(count):
                    raise OSError(12, "Cannot allocate memory")
            return original(address, size, access, *rest)

        monkeypatch.setattr(host_driver, "_mmap", refusing)

    return refuse


def with_a_request(pool: wl.MemoryPool, tokens: int = 8) -> wl.VirtualCache:
    cache = wl.VirtualCache(pool, **SHAPE)
    cache.reserve("a", tokens)
    cache.grow("a", tokens)
    return cache


def test_a_pool_that_could_not_be_closed_serves_on_and_maps_ahead(
    pool: wl.MemoryPool, refuse: Refuse
) -> None:
    cache = with_a_request(pool)
    cache.map_ahead("a", 8).result(30)  # the thread is there
    refuse("unmap", lambda count: count == 1)
    with pytest.raises(PageFailed, match=r"mmap failed"):
        pool.close()
    assert cache.requests == ["a"]
    with pytest.raises(MemoryClosed):
        cache.grow("a", 24)
    other = with_a_request(pool)
    other.map_ahead("a", 16).result(30)
    assert pool.stats().mapped == 6
    pool.close()
    with pytest.raises(MemoryClosed):
        other.map_ahead("a", 32)


def test_a_page_that_is_not_given_back_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = wl.MemoryPool(4 * PAGE, "cpu", page_bytes=PAGE)
    destroy, given = host_driver.HostDriver.destroy, list[int]()

    def third(driver: host_driver.HostDriver, handle: int) -> None:
        given.append(handle)
        if len(given) == 3:
            raise PageFailed(call="fallocate", size="4 KiB", reason="refused", remedy="Again.")
        destroy(driver, handle)

    monkeypatch.setattr(host_driver.HostDriver, "destroy", third)
    with pytest.raises(PageFailed):
        pool.close()
    pool.close()
    assert [handle // PAGE for handle in given] == [0, 1, 2, 2, 3]


def test_a_cache_whose_pages_were_not_unmapped_is_closed_all_the_same(
    pool: wl.MemoryPool, refuse: Refuse
) -> None:
    cache = with_a_request(pool)
    refuse("unmap", lambda count: count == 1)
    with pytest.raises(PageFailed):
        cache.close()
    assert cache.requests == [] and not cache._forget.alive and cache._views is None
    with pytest.raises(MemoryClosed):
        cache.grow("a", 16)
    cache.close()


def test_a_model_that_nobody_holds_fails_no_call_of_another(
    pool: wl.MemoryPool, refuse: Refuse
) -> None:
    other, abandoned = with_a_request(pool), with_a_request(pool)
    refuse("unmap", lambda count: count == 1)
    del abandoned
    gc.collect()
    other.release("a")
    assert other.requests == [] and pool.stats().unmaps == 0
    other.reserve("b", 24)
    other.grow("b", 24)
    assert pool.stats().unmaps == 2, "what was abandoned is unmapped before anything is mapped"


def test_keys_whose_values_were_refused_and_that_stay_are_unmapped_before_the_next_map(
    pool: wl.MemoryPool, refuse: Refuse
) -> None:
    """Released in between, their pages are free and may become those of another request."""
    cache = wl.VirtualCache(pool, **SHAPE)
    cache.reserve("a", 8)
    refuse("map", lambda count: count == 2)
    refuse("unmap", lambda count: count <= 2)
    with pytest.raises(PageFailed):
        cache.grow("a", 8)
    cache.release("a")
    cache.reserve("b", 16)
    with pytest.raises(PageFailed):
        cache.grow("b", 16)
    assert pool.stats().mapped == 0 and pool.stats().unmaps == 0
    cache.grow("b", 16)
    stats = pool.stats()
    assert (stats.mapped, stats.maps - stats.unmaps) == (4, 4)


@pytest.mark.parametrize("preallocate", [True, False])
def test_a_budget_beyond_the_machine_is_refused_before_anything_is_taken(
    monkeypatch: pytest.MonkeyPatch, preallocate: bool
) -> None:
    """The machine is made small, so that a pool that is taken all the same harms nobody."""
    monkeypatch.setattr(pools, "_memory_of", lambda device: 8 * PAGE)
    made: dict[str, Any] = {"device": "cpu", "page_bytes": PAGE, "preallocate": preallocate}
    with pytest.raises(BudgetTooLarge, match=r"is 36864; the machine has 32768 .* smaller pool"):
        wl.MemoryPool(9 * PAGE, **made)
    wl.MemoryPool(8 * PAGE, **made).close()


def test_the_memory_of_the_machine_is_what_the_system_says() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    told = next(line for line in lines if line.startswith("MemTotal"))
    assert pools._memory_of(torch.device("cpu")) == int(told.split()[1]) * 1024
