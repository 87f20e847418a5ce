"""The CUDA driver's calls, their order and what is waited for, beside a driver that is made up."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.fake_driver import PAGE, FakeDriver, install

import warploom as wl
from warploom.errors import ForbiddenUnderCapture, NoCudaCompiler
from warploom.memory_errors import (
    BudgetTooLarge,
    NoVirtualMemory,
    OutOfPages,
    OutOfSlots,
    PageFailed,
)
from warploom.runtime.devices import cuda
from warploom.serving.virtual_memory import cuda_driver, pool

CUDA = torch.device("cuda", 0)
SHAPE: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "max_requests": 4}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver()
    install(monkeypatch, made)
    monkeypatch.setattr(pool, "resolve_device", lambda device: CUDA)
    monkeypatch.setattr(pool, "_memory_of", lambda device: 100 * PAGE)
    yield made
    monkeypatch.setattr(cuda_driver, "refuse_under_capture", lambda *args: None)
    gc.collect()
    assert (made.handles, made.mapped, made.reserved) == (set(), {}, {}), "something is left"


def cache_of(memory: wl.MemoryPool, **changes: Any) -> wl.VirtualCache:
    return wl.VirtualCache(memory, **{**SHAPE, "max_tokens": 8000, **changes})


def test_a_request_is_mapped_in_the_drivers_order(driver: FakeDriver) -> None:
    with wl.MemoryPool(10 * PAGE) as memory, cache_of(memory) as cache:
        assert (memory.page_bytes, memory.num_pages) == (PAGE, 10)
        driver.calls.clear()
        cache.reserve("a", 2000)
        assert driver.calls == []
        cache.grow("a", 2000)  # 4 MiB of keys with the margin: 3 pages, and as many of values
        run = ["cuMemMap"] * 3 + ["cuMemSetAccess"]
        assert driver.calls == run * 2, "access is set once for pages side by side"
        driver.calls.clear()
        cache.grow("a", 2010)
        assert driver.calls == []
        cache.release("a")
        assert driver.calls == ["cuEventCreate", "cuEventRecord"]
        driver.calls.clear()
        cache.reserve("b", 1000)
        cache.grow("b", 1000)
        assert driver.calls == ["cuStreamWaitEvent"], "the stream waits, the host does not"
        driver.calls.clear()
        cache.trim()
        assert driver.calls == ["cuEventSynchronize"] + ["cuMemUnmap"] * 2


def test_no_page_is_unmapped_that_kernels_may_read(driver: FakeDriver) -> None:
    """The made-up driver asserts that, and all else that a device would refuse."""
    rng = random.Random(3)
    with wl.MemoryPool(40 * PAGE, preallocate=False) as memory:
        caches = [cache_of(memory), cache_of(memory, order=("token", "layer", "kv", "head"))]
        for _ in range(500):
            cache, name = rng.choice(caches), rng.randrange(6)
            try:
                if name not in cache.requests:
                    cache.reserve(name, rng.randint(0, 5000))
                elif rng.random() < 0.3:
                    driver.read = addresses(cache, name)
                    cache.release(name)
                else:
                    cache.map_ahead([name], 500).result(30)
                    cache.grow(name, min(8000, cache.length(name) + rng.randint(1, 900)))
            except (OutOfPages, OutOfSlots):
                continue
        assert memory.stats().unmaps > 20
        assert driver.calls.count("cuThreadExchangeStreamCaptureMode") == 1


def test_kernels_of_an_earlier_request_are_waited_for_on_every_stream(driver: FakeDriver) -> None:
    with wl.MemoryPool(10 * PAGE) as memory, cache_of(memory) as cache:
        cache.reserve("read", 3900)
        cache.grow("read", 3900)
        driver.read = addresses(cache, "read")
        cache.release("read")
        driver.read, driver.stream = set(), 8
        cache.reserve("cancelled", 100)
        driver.stream, driver.calls = 9, []
        cache.grow("cancelled", 3000)
        assert driver.calls == ["cuStreamWaitEvent"], "what it takes over may still be read"
        cache.grow("cancelled", 3001)
        assert driver.calls == ["cuStreamWaitEvent"]
        driver.stream = 10  # which is idle
        cache.release("cancelled")
        assert cache.trim() == 8 * PAGE, "the made-up driver refuses what may still be read"


def addresses(cache: wl.VirtualCache, request: object) -> set[int]:
    """Of all pages that the request holds and that are mapped."""
    span, tenant = cache._requests[request].span, cache._tenant
    rows, planes = range(min(span.held, span.mapped)), range(tenant.model.planes)
    return {tenant.address(span, plane, row) for row in rows for plane in planes}


def test_what_the_driver_refuses_is_undone(driver: FakeDriver) -> None:
    with wl.MemoryPool(10 * PAGE) as memory, cache_of(memory) as cache:
        for refused in ("cuMemMap", "cuMemSetAccess"):
            cache.reserve(refused, 1500)
            seen: list[str] = []

            def third(name: str, refused: str = refused, seen: list[str] = seen) -> bool:
                seen += [name] * (name == refused)
                return len(seen) == (3 if refused == "cuMemMap" else 2) and name == refused

            driver.fail = third
            with pytest.raises(PageFailed, match=rf"{refused} failed .* CUDA_ERROR_OUT_OF_MEMORY"):
                cache.grow(refused, 1500)
            assert driver.mapped == {}
            driver.fail = lambda name: False
            cache.grow(refused, 1500)
            assert len(driver.mapped) == 4
            cache.release(refused)
            cache.trim()


@pytest.mark.parametrize("refused", ["cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("undone", [0, 1, 2])
def test_what_could_not_be_undone_either_is_undone_before_the_next_map(
    driver: FakeDriver, refused: str, undone: int
) -> None:
    """The made-up driver refuses to map over a page, and to unmap where there is none."""
    with wl.MemoryPool(10 * PAGE) as memory, cache_of(memory) as cache:
        cache.reserve("a", 1500)
        calls = Counter[str]()

        def of_values(name: str) -> bool:
            calls[name] += 1
            mapping = name == refused and calls[name] == (4 if refused == "cuMemMap" else 2)
            return mapping or (name == "cuMemUnmap" and calls[name] == undone + 1)

        driver.fail = of_values
        with pytest.raises(PageFailed, match=rf"{refused} failed"):
            cache.grow("a", 1500)
        mapped = 3 if refused == "cuMemMap" else 4
        assert len(driver.mapped) == mapped - undone
        cache.grow("a", 1500)
        assert len(driver.mapped) == 4 and memory.stats().maps - memory.stats().unmaps == 4


def test_a_device_without_memory_leaves_nothing(driver: FakeDriver) -> None:
    created: list[str] = []

    def fourth(name: str) -> bool:
        created.extend([name] * (name == "cuMemCreate"))
        return name == "cuMemCreate" and len(created) == 4

    driver.fail = fourth
    with pytest.raises(PageFailed, match=r"cuMemCreate failed for 2 MiB"):
        wl.MemoryPool(10 * PAGE)
    assert driver.handles == set()


def test_what_a_device_cannot_do_is_said(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoVirtualMemory, match=r"page_bytes is 4096, .* a multiple of 2097152"):
        wl.MemoryPool(10 * PAGE, page_bytes=4096)
    monkeypatch.setattr(FakeDriver, "_cuDeviceGetAttribute", lambda *args: 0)
    with pytest.raises(NoVirtualMemory, match=r"cuda:0: the driver says .* Use a paged cache"):
        wl.MemoryPool(10 * PAGE)


def refuse(device: torch.device, what: str, remedy: str) -> None:
    raise ForbiddenUnderCapture(what=what, remedy=remedy)


def test_a_pool_that_is_collected_under_capture_goes_with_the_next_call(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = wl.MemoryPool(10 * PAGE)
    cache = cache_of(memory)
    cache.reserve("a", 500)
    cache.grow("a", 500)
    with wl.MemoryPool(2 * PAGE) as other:
        driver.calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(cuda_driver, "refuse_under_capture", refuse)
            del memory, cache
            gc.collect()
            with pytest.raises(ForbiddenUnderCapture):
                cache_of(other)
        assert driver.calls == [] and len(driver.handles) == 12
        cache_of(other).close()
        assert len(driver.handles) == 2 and driver.mapped == {}


def test_nothing_is_mapped_or_unmapped_under_capture(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = wl.MemoryPool(10 * PAGE)
    cache = cache_of(memory)
    cache.reserve("a", 500)
    cache.grow("a", 500)
    driver.calls.clear()
    with monkeypatch.context() as patched:
        patched.setattr(cuda_driver, "refuse_under_capture", refuse)
        for call in (
            lambda: cache.reserve("b"),
            lambda: cache.grow("a", 2000),
            lambda: cache.map_ahead("a", 2000),
            lambda: cache.release("a"),
            cache.trim,
            cache.close,
            memory.close,
            lambda: cache_of(memory),
        ):
            with pytest.raises(ForbiddenUnderCapture, match=r"captured. Reserve and grow before"):
                call()
        cache.grow("a", 600)  # there is memory
    assert driver.calls == []
    cache.close()
    memory.close()


def test_a_budget_beyond_the_device_is_refused_before_anything_is_made(driver: FakeDriver) -> None:
    with pytest.raises(BudgetTooLarge, match=rf"{100 * PAGE + 1}; cuda:0 has {100 * PAGE} bytes"):
        wl.MemoryPool(100 * PAGE + 1, preallocate=False)
    assert driver.calls == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_memory_of", lambda device: 100 * PAGE)

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(cuda, "import_module", missing)
    monkeypatch.setattr(pool, "resolve_device", lambda device: CUDA)
    with pytest.raises(NoCudaCompiler, match=r"cuda-bindings was not found.*warploom\[cu1"):
        wl.MemoryPool(10 * PAGE)
