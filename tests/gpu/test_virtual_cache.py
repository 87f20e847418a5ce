"""Virtual caches on a device: attention, graphs, kernels in flight, and memory that comes back."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import warploom as wl
from warploom.errors import ForbiddenUnderCapture
from warploom.memory_errors import PageFailed, PoolExhausted

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
DENSE, BY_TOKEN = ("layer", "kv", "token", "head"), ("token", "layer", "kv", "head")


@pytest.fixture
def pool(cuda: torch.device) -> Iterator[wl.MemoryPool]:
    with wl.MemoryPool(512 * MIB, cuda) as made:
        yield made


def cache_of(pool: wl.MemoryPool, **changes: Any) -> wl.VirtualCache:
    return wl.VirtualCache(pool, **{**SHAPE, "max_requests": 8, "max_tokens": 16_384, **changes})


def filled(cache: wl.VirtualCache, request: str, layer: int = 0) -> tuple[torch.Tensor, ...]:
    """Random keys and values as [token, head, dim], written and returned."""
    given = []
    for x in cache.view(request, layer):
        tokens = x.transpose(0, 1) if cache.kv_format.layout == "HND" else x
        tokens.copy_(torch.randn(tokens.shape, device=x.device))
        given.append(tokens.clone())
    return tuple(given)


def attention_over(cache: wl.VirtualCache, **options: Any) -> wl.AttentionWrapper:
    return wl.AttentionWrapper(
        wl.Causal(), kv_format=cache.kv_format, num_q_heads=8, device="cuda", **SHAPE, **options
    )


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return wl.attention(q[None], k[None], v[None], variant=wl.Causal())[0]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "storage",
    [
        {"order": DENSE},
        {"order": BY_TOKEN},
        {"order": ("head", "layer", "token", "kv"), "layout": "HND"},
        {"order": BY_TOKEN, "page_size": 16},
        {"order": DENSE, "page_size": 64},
    ],
)
@pytest.mark.parametrize("rows", [(1, 1, 1, 1), (4096, 300, 1, 700)])
def test_attention_over_a_virtual_cache(
    pool: wl.MemoryPool, storage: dict[str, Any], rows: tuple[int, ...]
) -> None:
    """Lengths end where pages end, and where addresses end: what tiles load there has memory."""
    lengths = {"a": 4096, "b": 16_384, "c": 1, "d": 8191}
    with cache_of(pool, num_layers=2, **storage) as cache:
        for request, tokens in lengths.items():
            cache.reserve(request, tokens)
            cache.grow(request, tokens)
        attention, qo = attention_over(cache), torch.tensor([0, *rows]).cumsum(0).tolist()
        attention.plan(qo, **cache.tables(lengths))
        q = torch.randn(qo[-1], 8, 128, device="cuda", dtype=torch.bfloat16)
        for layer in range(2):
            given = {request: filled(cache, request, layer) for request in lengths}
            out = attention.run(q, cache.kv(layer))
            for i, request in enumerate(lengths):
                own = slice(qo[i], qo[i + 1])
                close(out[own], expected(q[own], *given[request]))


def test_a_graph_reads_what_requests_have_grown_to(pool: wl.MemoryPool) -> None:
    """Captured once; memory is mapped, taken over and unmapped between replays."""
    bounds = wl.Bounds(max_requests=4, max_q_rows=4, max_kv_len=16_384, max_blocks=4)
    with cache_of(pool, max_requests=4) as cache:
        for request in "abcd":
            cache.reserve(request, 10)
            cache.grow(request, 10)
        given = {request: filled(cache, request) for request in "abcd"}
        attention = attention_over(cache, bounds=bounds, cuda_graph=True)
        q = torch.randn(4, 8, 128, device="cuda", dtype=torch.bfloat16)
        attention.plan([0, 1, 2, 3, 4], **cache.tables("abcd"))
        attention.run(q, cache.kv())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention.run(q, cache.kv())
        rng = random.Random(0)
        for _ in range(12):
            for request in rng.sample("abcd", 2):
                if rng.random() < 0.4:
                    cache.release(request)
                    cache.trim(rng.choice((0, None)))
                    cache.reserve(request, 10)
                cache.grow(request, min(16_384, cache.length(request) + rng.randint(1, 6000)))
                given[request] = filled(cache, request)
            attention.plan([0, 1, 2, 3, 4], **cache.tables("abcd"))
            graph.replay()
            for i, request in enumerate("abcd"):
                close(out[i : i + 1], expected(q[i : i + 1], *given[request]))


def test_nothing_is_mapped_under_capture_by_the_thread_that_captures(pool: wl.MemoryPool) -> None:
    with cache_of(pool) as cache:
        cache.reserve("a", 100)
        cache.grow("a", 100)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cache.grow("a", 120)
            for call in (
                lambda: cache.grow("a", 16_000),
                lambda: cache.map_ahead("a", 16_000),
                lambda: cache.reserve("b"),
                lambda: cache.release("a"),
                cache.trim,
                cache.close,
            ):
                with pytest.raises(ForbiddenUnderCapture):
                    call()
            torch.zeros(4, device="cuda")
        graph.replay()
        cache.grow("a", 16_000)


def test_memory_that_is_asked_for_before_may_be_mapped_during_a_capture(
    pool: wl.MemoryPool,
) -> None:
    with cache_of(pool) as cache:
        cache.reserve("a", 10)
        cache.map_ahead("a", 1).result(60)  # the thread is there
        x = torch.zeros(1 << 20, device="cuda")
        graph, mapped = torch.cuda.CUDAGraph(), []
        torch.cuda.synchronize()
        mapped.append(cache.map_ahead("a", 16_000))
        with torch.cuda.graph(graph):
            for _ in range(200):
                x.add_(1.0)
        mapped[0].result(60)
        x.zero_()
        graph.replay()
        cache.grow("a", 16_000)
        filled(cache, "a")
        assert (x == 200.0).all()


def test_kernels_in_flight_read_what_was_theirs(pool: wl.MemoryPool) -> None:
    """A request is released while kernels read it, and another model takes its pages at once."""
    with (
        wl.MemoryPool(16 * MIB, "cuda") as small,  # holds the pages of one request, not of two
        cache_of(small, max_tokens=8192) as first,
        cache_of(small, max_tokens=8192) as second,
    ):
        side = torch.cuda.Stream()
        for _ in range(10):
            first.reserve("a", 8192)
            first.grow("a", 8192)
            k, v = filled(first, "a")
            sums = []
            torch.cuda._sleep(20_000_000)
            for _ in range(5):
                sums.append(first.view("a")[0].float().sum() + first.view("a")[1].float().sum())
            first.release("a")
            with torch.cuda.stream(side):
                second.reserve("b", 8192)
                second.grow("b", 8192)
                for x in second.view("b"):
                    x.fill_(9.0)
                second.release("b")
            wanted = k.float().sum() + v.float().sum()
            for found in sums:
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1.0)
        assert small.stats().unmaps > 0


def test_a_request_that_takes_memory_over_on_another_stream_waits(pool: wl.MemoryPool) -> None:
    with cache_of(pool, max_requests=1) as cache:
        side = torch.cuda.Stream()
        cache.reserve("a", 8192)
        cache.grow("a", 8192)
        k, _ = filled(cache, "a")
        torch.cuda._sleep(50_000_000)
        found = cache.view("a")[0].clone()
        cache.release("a")
        with torch.cuda.stream(side):
            cache.reserve("b", 8192)
            cache.grow("b", 8192)
            cache.view("b")[0].zero_()
        torch.cuda.synchronize()
        assert torch.equal(found, k)


def taken_and_kept(cuda: torch.device) -> tuple[int, int]:
    """Bytes of the device that a pool of 1 GiB takes, and those that it keeps when it is closed."""
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(cuda)[0]
    pool = wl.MemoryPool(1024 * MIB, cuda)
    assert pool.page_bytes == 2 * MIB
    taken = before - torch.cuda.mem_get_info(cuda)[0]
    cache = cache_of(pool)
    cache.reserve("a", 16_384)
    cache.grow("a", 16_384)
    with pytest.raises(PoolExhausted):
        for request in range(7):
            cache.reserve(request, 16_384)
            cache.grow(request, 16_384)
        cache_of(pool, guaranteed_bytes=1020 * MIB)
    cache.close()
    pool.close()
    return taken, before - torch.cuda.mem_get_info(cuda)[0]


def test_memory_comes_back(cuda: torch.device) -> None:
    """The driver counts for all processes of a GPU: others may take or return some meanwhile."""
    tries = (taken_and_kept(cuda) for _ in range(10))
    assert any(taken >= 1000 * MIB and kept < 64 * MIB for taken, kept in tries)


@pytest.fixture
def alone(cuda: torch.device) -> torch.device:
    """Where no other process takes memory meanwhile, or gives any back."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("other workers of this run take memory of the device; run this file alone")
    free, total = torch.cuda.mem_get_info(cuda)
    if total - free - torch.cuda.memory_reserved(cuda) > 2048 * MIB:
        pytest.skip("other processes have memory of this device")
    return cuda


def test_a_device_that_is_full_refuses_a_pool(alone: torch.device) -> None:
    cuda = alone
    free = torch.cuda.mem_get_info(cuda)[0]
    total = torch.cuda.get_device_properties(cuda).total_memory
    with pytest.raises(PageFailed, match=r"cuMemCreate failed .*OUT_OF_MEMORY"):
        wl.MemoryPool(total, cuda)  # some of which the context has
    assert abs(torch.cuda.mem_get_info(cuda)[0] - free) < 256 * MIB


CHILD = """
import sys, warploom as wl
pool = wl.MemoryPool(4 << 30, "cuda")
cache = wl.VirtualCache(pool, num_kv_heads=8, head_dim=128, max_requests=64, max_tokens=16384)
for request in range(8):
    cache.reserve(request, 4096)
    cache.grow(request, 4096)
print("mapped", flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_a_killed_process(alone: torch.device) -> None:
    cuda = alone
    before = torch.cuda.mem_get_info(cuda)[0]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "mapped\n"
        assert before - torch.cuda.mem_get_info(cuda)[0] >= 4000 * MIB
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    for _ in range(100):  # the driver does it some time after the process is gone
        if before - torch.cuda.mem_get_info(cuda)[0] < 256 * MIB:
            return
        time.sleep(0.1)
    raise AssertionError("memory of the killed process is still taken")
