"""What virtual caches refuse, what they do when the system refuses, and what outlives a process."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import virtual_caches
from support.page_files import holders, page_files
from support.virtual_caches import PAGE

import warploom as wl
from warploom.errors import ArgumentError, NoGpu, UnsupportedSpec
from warploom.memory_errors import (
    AlreadyReserved,
    BudgetTooSmall,
    LimitReached,
    MemoryClosed,
    NotReserved,
    NoVirtualMemory,
    OtherProcess,
    OutOfSlots,
    PageFailed,
    PoolExhausted,
    RequestTooLong,
    ReservationFailed,
)
from warploom.serving.virtual_memory import host_driver
from warploom.serving.virtual_memory.driver import Addresses

SHAPE: dict[str, Any] = {**virtual_caches.SHAPE, "name": "llama"}


@pytest.fixture
def pool() -> Iterator[wl.MemoryPool]:
    with wl.MemoryPool(64 * PAGE, "cpu", page_bytes=PAGE) as made:
        yield made


@pytest.fixture
def cache(pool: wl.MemoryPool) -> Iterator[wl.VirtualCache]:
    with wl.VirtualCache(pool, **SHAPE) as made:
        yield made


def free(pool: wl.MemoryPool) -> int:
    return pool.stats().free


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"num_bytes": 4095, "page_bytes": 4096}, BudgetTooSmall, r"at least 4096, one page"),
        ({"num_bytes": 2**21 - 1}, BudgetTooSmall, r"at least 2097152, one page"),
        ({"num_bytes": 0}, ArgumentError, r"int of at least 1"),
        ({"num_bytes": 1e9}, ArgumentError, r"int of at least 1"),
        ({"page_bytes": 5000}, ArgumentError, r"expected a multiple of 4096"),
        ({"page_bytes": 0}, ArgumentError, r"int of at least 1"),
        ({"preallocate": "yes"}, ArgumentError, r"True or False"),
        ({"device": "meta"}, UnsupportedSpec, r"back ends are cuda and cpu"),
    ],
)
def test_pools_that_cannot_be(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        wl.MemoryPool(**{"num_bytes": 1 << 22, "device": "cpu", **given})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_pool_on_one() -> None:
    with pytest.raises(NoGpu):
        wl.MemoryPool(1 << 22, "cuda")


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"pool": None}, ArgumentError, r"expected a MemoryPool"),
        ({"max_requests": 0}, ArgumentError, r"max_requests"),
        ({"max_tokens": -1}, ArgumentError, r"max_tokens"),
        ({"max_tokens": 2**28}, ArgumentError, r"max_tokens: is .* at most 268435200"),
        ({"head_dim": 64.0}, ArgumentError, r"head_dim"),
        ({"page_size": 0}, ArgumentError, r"page_size"),
        ({"page_size": 2**30}, ArgumentError, r"page_size"),
        ({"order": ("layer", "token", "head")}, ArgumentError, r"each of layer, kv, token, head"),
        ({"order": "token"}, ArgumentError, r"each of layer, kv, token, head"),
        ({"layout": "DHN"}, ArgumentError, r"layout='NHD'"),
        ({"dtype": "float64"}, UnsupportedSpec, r"caches hold float16"),
        ({"limit_bytes": 4095}, BudgetTooSmall, r"limit_bytes is 4095 .* 2 pages, which the first"),
        ({"limit_bytes": 4096}, BudgetTooSmall, r"limit_bytes is 4096 .* least 8192, 2 pages"),
        ({"guaranteed_bytes": 65 * PAGE}, BudgetTooSmall, r"what is guaranteed"),
        ({"guaranteed_bytes": -1}, ArgumentError, r"at least 0"),
        ({"num_layers": 33}, BudgetTooSmall, r"the pool is 262144 .* least 270336, 66 pages"),
        (
            {"page_size": 128, "num_layers": 4, "max_tokens": 400},
            BudgetTooSmall,
            r"least 524288, 128 pages",
        ),
        ({"max_requests": 2**22, "max_tokens": 2**22}, ReservationFailed, r"lower max_requests"),
        ({"max_requests": 2**27, "max_tokens": 2**27}, ReservationFailed, r"63 bits"),
    ],
)
def test_caches_that_cannot_be(
    pool: wl.MemoryPool, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    if "page_size" in given or "max_requests" in given:
        given = {"max_tokens": 2**27, "page_size": None, **given}
    with pytest.raises(error, match=text):
        wl.VirtualCache(given.pop("pool", pool), **{**SHAPE, **given})
    assert pool.stats().models == () and free(pool) == 64


def test_requests_that_cannot_be(pool: wl.MemoryPool, cache: wl.VirtualCache) -> None:
    for call in (
        lambda: cache.grow("a", 1),
        lambda: cache.release("a"),
        lambda: cache.map_ahead(["a"]),
        lambda: cache.view("a"),
        lambda: cache.tables(["a"]),
        lambda: cache.length("a"),
    ):
        with pytest.raises(NotReserved, match=r"llama holds no request 'a'"):
            call()
    with pytest.raises(RequestTooLong, match=r"would have 401 tokens; llama has addresses for 400"):
        cache.reserve("a", 401)
    with pytest.raises(PoolExhausted, match=r"llama needs 66 more pages .* 64 of 64 can be had"):
        cache.reserve("a", 264)
    assert cache.requests == []
    cache.reserve("a", 8)
    with pytest.raises(AlreadyReserved, match=r"'a' already"):
        cache.reserve("a")
    wrong: Any
    for wrong in (-1, 2.0, "8", True):
        with pytest.raises(ArgumentError, match=r"tokens: is .* at least 0"):
            cache.grow("a", wrong)
    with pytest.raises(RequestTooLong, match=r"'a' would have 500"):
        cache.grow("a", 500)
    with pytest.raises(ArgumentError, match=r"layers 0 to 0"):
        cache.kv(1)
    cache.reserve("b")
    cache.reserve("c")
    with pytest.raises(OutOfSlots, match=r"all 3 places of llama"):
        cache.reserve("d")
    cache.release("a")
    with pytest.raises(NotReserved, match=r"released already"):
        cache.release("a")
    assert free(pool) == 64


def test_a_request_that_gets_no_more_keeps_what_it_has(pool: wl.MemoryPool) -> None:
    with wl.VirtualCache(pool, **SHAPE, limit_bytes=8 * PAGE) as cache:
        cache.reserve("a", 20)
        cache.grow("a", 20)
        cache.view("a")[0].fill_(7.0)
        cache.reserve("b", 8)
        for call in (
            lambda: cache.grow("a", 40),
            lambda: cache.map_ahead("ab", 20),
            lambda: cache.reserve("c", 1),
        ):
            with pytest.raises(LimitReached, match=r"has 8 of the 8 .* larger limit_bytes"):
                call()
        assert cache.length("a") == 20 and (cache.view("a")[0] == 7.0).all()
        cache.release("b")
        cache.grow("a", 32)


def test_a_closed_cache_or_pool_serves_no_one(pool: wl.MemoryPool) -> None:
    cache = wl.VirtualCache(pool, **SHAPE)
    cache.reserve("a", 8)
    cache.grow("a", 8)
    cache.close()
    for call in (lambda: cache.reserve("b"), lambda: cache.grow("a", 1), cache.trim, cache.kv):
        with pytest.raises(MemoryClosed, match=r"cache of llama is closed"):
            call()
    other = wl.VirtualCache(pool, **SHAPE)
    other.reserve("a", 8)
    other.grow("a", 8)
    pool.close()
    for call in (lambda: other.grow("a", 1), lambda: other.release("a"), other.kv):
        with pytest.raises(MemoryClosed):
            call()
    with pytest.raises(MemoryClosed, match=r"pool is closed"):
        wl.VirtualCache(pool, **SHAPE)
    other.close()


def test_where_memory_is_refused_nothing_is_mapped_and_it_can_be_tried_again(
    pool: wl.MemoryPool, cache: wl.VirtualCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, maps = host_driver._mmap, []

    def refuse(address: int, size: int, access: int, *rest: int) -> int:
        if access:
            maps.append(address)
            if len(maps) == 2:  # of values, when keys are mapped
                raise OSError(12, "Cannot allocate memory")
        return original(address, size, access, *rest)

    cache.reserve("a", 8)
    with monkeypatch.context() as patched:
        patched.setattr(host_driver, "_mmap", refuse)
        with pytest.raises(PageFailed, match=r"mmap failed for 4 KiB: Cannot .* smaller pool"):
            cache.grow("a", 8)
        assert cache.length("a") == 0 and pool.stats().allocated == 2
        maps.clear()
        with pytest.raises(PageFailed):
            cache.map_ahead("a", 8).result(30)
    assert not has_access(maps[0])
    cache.grow("a", 8)
    assert has_access(maps[0]) and pool.stats().mapped == 2


def test_pages_that_do_not_lie_side_by_side_and_are_mapped_in_part_are_unmapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = host_driver.HostDriver(PAGE, 4)
    addresses, original = Addresses(driver, 4 * PAGE), host_driver._mmap
    handles = [driver.create(page) for page in (0, 1, 3, 2)]  # three runs
    driver.map(addresses.first, handles)
    assert [has_access(addresses.first + i * PAGE) for i in range(4)] == [True] * 4
    driver.unmap(addresses.first, 4)

    def refuse(address: int, size: int, access: int, *rest: int) -> int:
        if access and address == addresses.first + 3 * PAGE:
            raise OSError(12, "Cannot allocate memory")
        return original(address, size, access, *rest)

    monkeypatch.setattr(host_driver, "_mmap", refuse)
    with pytest.raises(PageFailed, match=r"mmap failed for 16 KiB"):
        driver.map(addresses.first, handles)
    driver.unmap(addresses.first, 4)
    assert not any(has_access(addresses.first + i * PAGE) for i in range(4))
    driver.close()


def has_access(address: int) -> bool:
    """What the system says, without touching it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(x, 16) for x in line.split()[0].split("-"))
        if low <= address < high:
            return line.split()[1].startswith("rw")
    return False


def test_addresses_without_a_page_cannot_be_touched(cache: wl.VirtualCache) -> None:
    cache.reserve("a", 8)
    cache.grow("a", 8)
    last, k = cache.tables("a")["kv_indices"][-1], cache.kv()[0]
    assert has_access(k[last].data_ptr()) and not has_access(k[last + 1].data_ptr())
    assert in_child(lambda: k[last].sum()) == 0
    assert in_child(lambda: k[last + 1].sum()) == signal.SIGSEGV
    cache.release("a")
    cache.trim()
    assert not has_access(k[last].data_ptr())


def in_child(work: Callable[[], object]) -> int:
    """Status of a forked process that does something: 0, or the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        signal.alarm(30)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def test_a_pool_that_gets_no_memory_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    asked = []

    def refuse(file: int, offset: int, size: int) -> None:
        asked.append(offset)
        if offset == 3 * PAGE:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(PageFailed, match=r"fallocate failed for 4 KiB: No space .* smaller pool"):
        wl.MemoryPool(8 * PAGE, "cpu", page_bytes=PAGE)
    assert len(os.listdir("/proc/self/fd")) == before and len(asked) == 4
    with (
        wl.MemoryPool(8 * PAGE, "cpu", page_bytes=PAGE, preallocate=False) as pool,
        wl.VirtualCache(pool, **SHAPE) as cache,
    ):
        cache.reserve("a", 8)
        cache.grow("a", 8)
        with pytest.raises(PageFailed, match=r"No space"):
            cache.grow("a", 16)
        cache.grow("a", 8)
    assert len(os.listdir("/proc/self/fd")) == before


def test_systems_without_files_in_memory_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(NoVirtualMemory, match=r"memfd_create.* Use the CPU twin on Linux"):
        wl.MemoryPool(8 * PAGE, "cpu", page_bytes=PAGE)


def test_a_forked_process_leaves_its_parents_pool_alone(
    pool: wl.MemoryPool, cache: wl.VirtualCache
) -> None:
    cache.reserve("a", 8)
    cache.grow("a", 8)
    cache.view("a")[0].fill_(7.0)

    def child() -> None:
        mapped: list[Callable[[], object]] = [lambda: cache.grow("a", 8), lambda: cache.view("a")]
        mapped += [cache.kv, lambda: cache.tables("a"), lambda: cache.map_ahead("a", 0)]
        for call in (*mapped, lambda: cache.reserve("b"), lambda: cache.release("a"), cache.close):
            with pytest.raises(OtherProcess, match=r"forked from it"):
                call()
        pool.close()

    assert in_child(child) == 0
    assert (cache.view("a")[0] == 7.0).all()
    cache.grow("a", 16)


def test_nothing_is_left_of_a_killed_process() -> None:
    """Its pages are parts of a file without a name, which nobody has open or mapped afterwards."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            pool = wl.MemoryPool(64 * PAGE, "cpu", page_bytes=PAGE)
            cache = wl.VirtualCache(pool, **SHAPE)
            cache.reserve("a", 200)
            cache.grow("a", 200)
            cache.map_ahead("a", 8).result(30)
            os.write(tell, b"x")
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(tell)
        assert os.read(told, 1) == b"x"
        inherited = page_files(os.getpid())  # of pools that other tests have not lost yet
        (inode,) = page_files(pid) - inherited
        assert holders(inode) == {pid}
    finally:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        os.close(told)
    assert status == signal.SIGKILL and holders(inode) == set()


def test_the_memory_of_a_pool_is_taken_and_given_back() -> None:
    """Of the file, which the system counts: all at once, or page by page."""
    eager = wl.MemoryPool(8 * PAGE, "cpu", page_bytes=PAGE)
    file: int = eager._mapper._driver._file  # type: ignore[attr-defined]
    assert os.fstat(file).st_blocks * 512 == 8 * PAGE
    eager._mapper._driver.destroy(0)
    assert os.fstat(file).st_blocks * 512 == 7 * PAGE
    eager.close()
    lazy = wl.MemoryPool(8 * PAGE, "cpu", page_bytes=PAGE, preallocate=False)
    file = lazy._mapper._driver._file  # type: ignore[attr-defined]
    assert os.fstat(file).st_blocks == 0
    with wl.VirtualCache(lazy, **SHAPE) as cache:
        cache.reserve("a", 8)
        assert os.fstat(file).st_blocks == 0
        cache.grow("a", 8)
        assert os.fstat(file).st_blocks * 512 == 2 * PAGE
        first = cache.view("a")[0].data_ptr()
        assert ctypes.string_at(first, 4) == bytes(4)
    lazy.close()
