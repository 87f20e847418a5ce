"""Virtual caches over the CPU twin: attention, contents, addresses and what models share."""

from __future__ import annotations

import gc
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import warploom as wl
from warploom import memory_errors
from warploom.serving.virtual_memory.host_driver import HostDriver

PAGE, HEADS, DIM = 4096, 2, 64
SHAPE: dict[str, Any] = {"num_kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"}
DENSE, SPARSE = ("layer", "kv", "token", "head"), ("token", "layer", "kv", "head")


@pytest.fixture
def pool() -> Iterator[wl.MemoryPool]:
    with wl.MemoryPool(512 * PAGE, "cpu", page_bytes=PAGE) as made:
        yield made


def cache_of(pool: wl.MemoryPool, **changes: Any) -> wl.VirtualCache:
    return wl.VirtualCache(pool, **{**SHAPE, "max_requests": 4, "max_tokens": 400, **changes})


def counts(pool: wl.MemoryPool) -> tuple[int, int, int, int]:
    stats = pool.stats()
    return stats.free, stats.allocated, stats.mapped, stats.reusable


def fill(cache: wl.VirtualCache, request: str, layer: int = 0) -> tuple[torch.Tensor, ...]:
    """Random keys and values as [token, head, dim], written and returned."""
    given = []
    for x in cache.view(request, layer):
        tokens = x.transpose(0, 1) if cache.kv_format.layout == "HND" else x
        tokens.copy_(torch.randn(tokens.shape))
        given.append(tokens.clone())
    return tuple(given)


@pytest.mark.parametrize(
    "storage",
    [
        {"order": DENSE},
        {"order": SPARSE},
        {"order": ("head", "token", "kv", "layer"), "layout": "HND"},
        {"order": SPARSE, "page_size": 16},
        {"order": DENSE, "page_size": 16, "layout": "HND"},
    ],
)
def test_attention_over_a_virtual_cache_is_that_over_its_keys(
    pool: wl.MemoryPool, storage: dict[str, Any]
) -> None:
    lengths = {"a": 37, "b": 400, "none": 0, "c": 128}  # b ends where its addresses end
    rows = [1, 3, 1, 5]
    qo = np.cumsum([0, *rows])
    q = torch.randn(int(qo[-1]), 4, DIM)
    with cache_of(pool, num_layers=2, **storage) as cache:
        for request, tokens in lengths.items():
            cache.reserve(request, tokens)
            cache.grow(request, tokens)
        held = {(r, layer): fill(cache, r, layer) for r in lengths for layer in range(2)}
        attention = wl.AttentionWrapper(
            wl.Causal(), kv_format=cache.kv_format, num_q_heads=4, device="cpu", **SHAPE
        )
        attention.plan(qo, **cache.tables(lengths))
        for layer in range(2):
            out = attention.run(q, cache.kv(layer))
            for i, request in enumerate(lengths):
                k, v = (x[None] for x in held[request, layer])
                own = q[qo[i] : qo[i + 1]][None]
                expected = wl.attention(own, k, v, variant=wl.Causal(), backend="reference")[0]
                torch.testing.assert_close(out[qo[i] : qo[i + 1]], expected.float())


def test_appended_tokens_arrive_in_the_requests_own_memory(pool: wl.MemoryPool) -> None:
    with cache_of(pool, order=SPARSE, num_layers=2) as cache:
        for request, tokens in (("a", 3), ("b", 20)):
            cache.reserve(request)
            cache.grow(request, tokens)
            fill(cache, request, 1)
        before = {r: cache.view(r, 1)[0].clone() for r in "ab"}
        k, v = torch.randn(2, 3, HEADS, DIM)
        cache.grow("a", 5)
        cache.grow("b", 21)
        wl.append(k, v, cache.kv(1), [0, 2, 3], **cache.tables("ab"))
        for request, new in (("a", slice(0, 2)), ("b", slice(2, 3))):
            keys, values = cache.view(request, 1)
            old = before[request]
            assert torch.equal(keys, torch.cat([old, k[new]]))
            assert torch.equal(values[len(old) :], v[new])


def test_addresses_stay_while_memory_comes_and_goes(pool: wl.MemoryPool) -> None:
    with cache_of(pool) as cache:
        k, v = cache.kv()
        addresses = k.data_ptr(), v.data_ptr()
        slot = cache.reserve("a")
        for tokens in range(1, 401, 7):
            cache.grow("a", tokens)
            cache.view("a")[0][-1] = tokens
        assert k[slot, :400:7, 0, 0].tolist() == list(range(1, 401, 7))
        assert (cache.kv()[0].data_ptr(), cache.kv()[1].data_ptr()) == addresses
        cache.release("a")
        assert cache.trim() > 0
        cache.reserve("b", 400)
        cache.grow("b", 400)
        assert (k.data_ptr(), v.data_ptr()) == addresses
        assert cache.tables("b")["kv_indices"].tolist() == [slot]


def test_a_reserved_request_has_pages_that_are_mapped_as_it_grows(pool: wl.MemoryPool) -> None:
    with cache_of(pool, page_size=1) as cache:  # 8 tokens of 512 bytes to a page; keys and values
        cache.reserve("a", 17)
        assert counts(pool) == (506, 6, 0, 0)
        cache.grow("a", 1)
        assert counts(pool) == (506, 0, 6, 0), "what is mapped is all that the request holds"
        cache.grow("a", 25)
        assert counts(pool) == (504, 0, 8, 0)
        cache.grow("a", 3)  # a refused draft
        assert counts(pool) == (504, 0, 8, 0) and cache.length("a") == 3
        cache.release("a")
        assert counts(pool) == (504, 0, 0, 8)


def test_the_next_request_takes_memory_over_as_it_is(pool: wl.MemoryPool) -> None:
    with cache_of(pool) as cache:
        for request, tokens in (("long", 300), ("short", 50)):
            cache.reserve(request, tokens)
            cache.grow(request, tokens)
        slots = {r: cache.tables([r])["kv_indices"][0] for r in cache.requests}
        cache.release("long")
        cache.release("short")
        before = pool.stats()
        assert cache.reserve("next", 40) == slots["short"]
        cache.grow("next", 40)
        after = pool.stats()
        assert (after.maps, after.unmaps) == (before.maps, before.unmaps)
        assert after.reuses > before.reuses


def test_a_page_goes_from_model_to_model_with_its_contents() -> None:
    with (
        wl.MemoryPool(4 * PAGE, "cpu", page_bytes=PAGE) as small,
        cache_of(small, name="first", page_size=1) as first,
        cache_of(small, name="second", page_size=1) as second,
    ):
        first.reserve("a", 16)
        first.grow("a", 16)
        k, v = fill(first, "a")
        with pytest.raises(memory_errors.PoolExhausted, match=r"second needs 2 .* 0 of 4"):
            second.reserve("b", 8)
        assert second.requests == []
        first.release("a")
        second.reserve("b", 16)
        second.grow("b", 16)
        found = torch.cat([x.flatten() for x in second.view("b")]).sort().values
        assert torch.equal(found, torch.cat([k.flatten(), v.flatten()]).sort().values)
        assert small.stats().unmaps == 4 and second.requests == ["b"]


def test_no_memory_has_two_owners() -> None:
    """Requests of two models come, grow and go at random; each finds its own numbers again."""
    rng, written = random.Random(5), {}
    with wl.MemoryPool(60 * PAGE, "cpu", page_bytes=PAGE, preallocate=False) as small:
        caches = [
            cache_of(small, page_size=4, guaranteed_bytes=10 * PAGE, name="dense"),
            cache_of(small, page_size=4, order=SPARSE, num_layers=3, limit_bytes=40 * PAGE),
        ]
        for step in range(600):
            cache = rng.choice(caches)
            name = (caches.index(cache), rng.randrange(5))
            try:
                if name not in cache.requests:
                    cache.reserve(name, rng.randint(0, 60))
                    written[name] = 0
                elif rng.random() < 0.25:
                    cache.release(name)
                    del written[name]
                    continue
                cache.map_ahead([name], rng.randint(0, 9))
                cache.grow(name, min(400, written[name] + rng.randint(1, 30)))
            except (memory_errors.OutOfPages, memory_errors.OutOfSlots):
                if name not in cache.requests:
                    continue
            new = cache.length(name)
            last = caches.index(cache) * 2  # the last layer
            for x in cache.view(name, last):
                place = torch.arange(new)[:, None, None] + 1000 * name[1] + 10_000 * last
                x[written[name] :] = place[written[name] :].float()
                assert (x == place).all(), step
            written[name] = new
        assert small.stats().unmaps > 50 and small.stats().reuses > 50
        for cache in caches:
            cache.close()
        assert small.stats().free == 60


def test_memory_is_mapped_ahead_in_another_thread(
    pool: wl.MemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, mappers, original = threading.Event(), threading.Event(), [], HostDriver.map

    def slow(driver: HostDriver, *args: Any) -> None:
        mappers.append(threading.current_thread())
        begun.set()
        assert go_on.wait(30)
        original(driver, *args)

    with cache_of(pool, page_size=1) as cache:
        for request in "ab":
            cache.reserve(request, 8)
            cache.grow(request, 8)
        monkeypatch.setattr(HostDriver, "map", slow)
        mapped = cache.map_ahead("ab", 1)
        assert begun.wait(30)
        cache.grow("a", 7)  # needs nothing that is being mapped, and does not wait
        assert not mapped.done()
        threading.Timer(0.05, go_on.set).start()
        cache.grow("a", 9)
        assert go_on.is_set()
        mapped.result(30)
        assert threading.main_thread() not in mappers
        cache.grow("b", 9)
        assert counts(pool) == (504, 0, 8, 0)
        nothing = cache.map_ahead("ab", 7)
        assert nothing.done() and nothing.result() is None, "there is memory for 16 tokens"
        assert cache.map_ahead("a", 3) is nothing and not nothing.cancel()


def test_threads_may_grow_requests_of_their_own(pool: wl.MemoryPool) -> None:
    with cache_of(pool, page_size=1) as cache:
        failures: list[BaseException] = []

        def work(request: int) -> None:
            try:
                for turn in range(5):
                    cache.reserve(request)
                    for tokens in range(1, 120, 3):
                        cache.map_ahead([request], 3)
                        cache.grow(request, tokens)
                        for x in cache.view(request):
                            x[-1] = 100 * request + turn
                    assert (cache.view(request)[0][::3] == 100 * request + turn).all()
                    cache.release(request)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


def test_closed_caches_give_pages_back_and_addresses_when_no_tensor_is_left() -> None:
    pool = wl.MemoryPool(64 * PAGE, "cpu", page_bytes=PAGE)
    cache = cache_of(pool)
    cache.reserve("a", 9)
    cache.grow("a", 9)
    tensor, first = cache.kv()[0], cache.kv()[0].data_ptr()
    cache.close()
    cache.close()
    assert pool.stats().free == 64 and pool.stats().models == ()
    del cache
    gc.collect()
    assert reserved(first), "a tensor is left, so that nothing else comes to lie there"
    del tensor
    gc.collect()
    assert not reserved(first)
    pool.close()
    pool.close()


def test_a_cache_that_nobody_holds_leaves_its_pages_to_the_others(pool: wl.MemoryPool) -> None:
    cache = cache_of(pool, name="lost")
    cache.reserve("a", 400)
    cache.grow("a", 400)
    first = cache.kv()[0].data_ptr()
    other = cache_of(pool, name="other")
    del cache
    gc.collect()
    other.reserve("b", 1)
    assert [model.name for model in pool.stats().models] == ["other"]
    gc.collect()
    assert not reserved(first)


def reserved(address: int) -> bool:
    found = re.findall(r"^(\w+)-(\w+) ", Path("/proc/self/maps").read_text(), re.M)
    return any(int(low, 16) <= address < int(high, 16) for low, high in found)


def test_a_pool_and_its_models_are_shown(pool: wl.MemoryPool) -> None:
    with cache_of(pool, name="llama", guaranteed_bytes=10 * PAGE) as cache:
        cache.reserve("a", 9)
        cache.grow("a", 9)
        console = Console(width=120)
        with console.capture() as shown:
            console.print(pool)
        text = shown.get()
        assert "512 pages of 4 KiB on cpu" in text and "llama" in text and "40 KiB" in text
        assert f"{pool.stats().mapped} mapped" in repr(pool)
        assert repr(cache).startswith("VirtualCache(llama: 1 of 4 requests, 9 tokens")
