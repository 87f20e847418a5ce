"""FlashInfer's calls on a GPU: graphs that replay later plans, prefills, and POD of one cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.flashinfer_reference import Asked, Batch, assert_close

from warploom.engines import flashinfer as calls
from warploom.errors import ForbiddenUnderCapture

pytestmark = pytest.mark.gpu

flashinfer: Any = calls  # whose callers unpack lists of tables
TYPES: dict[str, Any] = {"q_data_type": torch.bfloat16}
SIZES = (8, 2, 64, 16)  # heads, lanes, tokens of a page


def batch_of(lengths: list[tuple[int, int]], seed: int = 0) -> Batch:
    """With numbers that bfloat16 has."""
    shape: dict[str, Any] = {"heads": SIZES[:2], "lanes": SIZES[2], "page_size": SIZES[3]}
    return Batch.of(lengths, **shape, seed=seed, kv_dtype=torch.bfloat16)


def on(device: torch.device, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """q and the cache."""
    return batch.q.to(device, torch.bfloat16), tuple(x.to(device) for x in batch.cache)


def close(got: Any, batch: Batch, asked: Any) -> None:
    rounded = Batch(**{**vars(batch), "q": batch.q.bfloat16().float()})
    assert_close([x.cpu() for x in got], rounded.expected(asked), 2e-2)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_captured_decode_replays_later_plans(on_device: bool, cuda: Any) -> None:
    """With scales, which the plan is not told of, and sinks in another graph."""
    workspace = torch.empty(1, dtype=torch.uint8, device=cuda)
    buffers = [torch.zeros(n, dtype=torch.int32, device=cuda) for n in (4, 400, 3)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
    sinks = torch.randn(8, device=cuda)
    batches = [batch_of([(1, n) for n in keys]) for keys in ((90, 300, 17), (1, 2000, 800))]
    q = torch.zeros(3, 8, 64, dtype=torch.bfloat16, device=cuda)
    cache = torch.zeros(400, 2, 16, 2, 64, dtype=torch.bfloat16, device=cuda)

    def plan(batch: Batch) -> None:
        tables = batch.indptr, batch.indices, batch.last_page_len
        where = cuda if on_device else "cpu"
        wrapper.plan(*(x.to(where) for x in tables), *SIZES, logits_soft_cap=20.0, **TYPES)
        q.copy_(batch.q)
        for half, stored in zip(cache.unbind(1), batch.cache, strict=True):
            half[: len(stored)].copy_(stored)

    def runs() -> list[Any]:
        scaled = wrapper.run_return_lse(q, cache, k_scale=0.5, v_scale=2.0)
        return [scaled, wrapper.run_return_lse(q, cache, sinks=sinks)]

    plan(batches[0])
    runs()  # compiles both
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = runs()
    asked = Asked(cap=20.0, factor=0.5, v_scale=2.0), Asked(cap=20.0, sinks=sinks.cpu())
    for batch in (*batches, batches[0]):
        plan(batch)
        graph.replay()
        for got, one in zip(results, asked, strict=True):
            close(got, batch, one)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_captured_decode_replays_fast_plans(
    page_size: int, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SGLang plans: the first time on the device, then from an indptr of the host."""
    if page_size == 1:
        monkeypatch.setenv("WARPLOOM_VERIFY_PLANS", "0")  # to read a plan back waits for the device
    heads, lanes = SIZES[:2], SIZES[2]
    batches = [
        Batch.of([(1, n) for n in keys], heads=heads, lanes=lanes, page_size=page_size, seed=seed,
            kv_dtype=torch.bfloat16)
        for seed, keys in enumerate(((90, 300, 17), (1, 700, 0)))
    ]  # fmt: skip
    q = torch.zeros(3, 8, 64, dtype=torch.bfloat16, device=cuda)
    lists = [torch.zeros(n, dtype=torch.int32, device=cuda) for n in (4, 800, 3)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1, dtype=torch.uint8, device=cuda), *lists
    )

    def fill(batch: Batch) -> None:
        """Lists of the engine's own, on the device."""
        tables = batch.indptr, batch.indices, batch.last_page_len
        for mine, given in zip(lists, tables, strict=True):
            mine[: len(given)].copy_(given)
        q.copy_(batch.q)

    cache = tuple(torch.zeros(800, page_size, 2, 64, dtype=torch.bfloat16, device=cuda)
        for _ in range(2))  # fmt: skip
    sizes = (*heads, lanes, page_size)
    fill(batches[0])
    wrapper.begin_forward(*lists, *sizes, **TYPES)
    wrapper.run(q, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = wrapper.run_return_lse(q, cache)
    wrapper.begin_forward = partial(flashinfer.decode.fast_decode_plan, wrapper)
    for batch in (*reversed(batches), batches[1]):
        fill(batch)
        for half, stored in zip(cache, batch.cache, strict=True):
            half[: len(stored)].copy_(stored)
        torch.cuda.set_sync_debug_mode("error" if page_size == 1 else "default")
        try:
            wrapper.begin_forward(
                *lists, *sizes, **TYPES, non_blocking=True, global_override_indptr_cpu=batch.indptr
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        close(results, batch, Asked())


def test_captured_forwards_of_layers_replay_plans_that_name_none(cuda: Any) -> None:
    """As SGLang captures: a plan without a soft-cap or window, which each layer's forward has."""
    workspace = torch.empty(1, dtype=torch.uint8, device=cuda)
    buffers = [torch.zeros(n, dtype=torch.int32, device=cuda) for n in (4, 400, 3)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
    batches = [batch_of([(1, n) for n in keys]) for keys in ((90, 300, 17), (1, 2000, 800))]
    layers = [Asked(), Asked(cap=20.0), Asked(window=50)]
    q = torch.zeros(3, 8, 64, dtype=torch.bfloat16, device=cuda)
    cache = torch.zeros(400, 2, 16, 2, 64, dtype=torch.bfloat16, device=cuda)

    def begin(batch: Batch) -> None:
        wrapper.begin_forward(batch.indptr, batch.indices, batch.last_page_len, *SIZES, **TYPES)
        q.copy_(batch.q)
        for half, stored in zip(cache.unbind(1), batch.cache, strict=True):
            half[: len(stored)].copy_(stored)

    def forward(asked: Asked) -> Any:
        shaping = {"logits_soft_cap": asked.cap, "window_left": asked.window}
        return wrapper.forward_return_lse(q, cache, sm_scale=64**-0.5, **shaping)

    begin(batches[0])
    for asked in layers:
        forward(asked)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [forward(asked) for asked in layers]
    for batch in (*batches, batches[0]):
        begin(batch)
        graph.replay()
        torch.cuda.synchronize()
        for out, asked in zip(outs, layers, strict=True):
            close(out, batch, asked)


def test_a_use_that_no_run_had_before_is_not_captured(cuda: Any) -> None:
    batch = batch_of([(1, 20), (1, 9)])
    workspace = torch.empty(1, dtype=torch.uint8, device=cuda)
    buffers = [torch.zeros(n, dtype=torch.int32, device=cuda) for n in (3, 9, 2)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
    wrapper.plan(batch.indptr, batch.indices, batch.last_page_len, *SIZES, **TYPES)
    q, cache = on(cuda, batch)
    wrapper.run(q, cache)
    with pytest.raises(ForbiddenUnderCapture, match="Run so once before"):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            wrapper.run(q, cache, k_scale=0.5)


def test_prefills_and_appends(cuda: Any) -> None:
    batch = batch_of([(40, 90), (7, 7), (0, 20), (300, 300)])
    q, cache = on(cuda, batch)
    tables = [x.to(cuda) for x in (batch.qo_indptr, batch.indptr, batch.indices)]
    last = batch.last_page_len.to(cuda)
    rows = int(batch.qo_indptr[-1])
    lens = flashinfer.get_seq_lens(tables[1], last, 16)
    where = flashinfer.get_batch_indices_positions(tables[0], lens, rows + 3)
    new = [
        torch.cat([x[len(x) - n :] for x, n in zip(one, batch.qo_indptr.diff(), strict=True)])
        for one in (batch.keys, batch.values)
    ]
    k, v = (torch.cat((x, x[:3])).to(cuda, torch.bfloat16) for x in new)
    pages = tables[2].long()
    before = [x.clone() for x in cache]
    flashinfer.append_paged_kv_cache(k, v, *where, cache, tables[2], tables[1], last)
    assert all(torch.equal(a[pages], b[pages]) for a, b in zip(cache, before, strict=True))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(last)
    wrapper.plan(*tables, last, *SIZES, causal=True, window_left=50, **TYPES)
    close(wrapper.run_return_lse(q, cache), batch, Asked(causal=True, window=50))
    sizes = zip(batch.qo_indptr.diff().tolist(), map(len, batch.keys), strict=True)
    masks = [torch.rand(size) < 0.7 for size in sizes]
    flat = torch.cat([one.flatten() for one in masks]).to(cuda)
    wrapper.plan(*tables, last, *SIZES, custom_mask=flat, **TYPES)
    close(wrapper.run_return_lse(q, cache), batch, [Asked(mask=one) for one in masks])


def test_prefills_and_decodes_of_one_cache(cuda: Any) -> None:
    batch = batch_of([(200, 300), (1, 90), (1, 1000)])
    q, cache = on(cuda, batch)
    halves = (
        *(batch.qo_indptr[:2], batch.indptr[:2], batch.indices, batch.last_page_len[:1]),
        *(batch.qo_indptr[1:] - 200, batch.indptr[1:], batch.indices, batch.last_page_len[1:]),
    )
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(torch.empty(1, device=cuda))
    wrapper.plan(*(x.to(cuda) for x in halves), *SIZES, **TYPES)
    got = wrapper.run(q[:200], cache, q[200:], cache, causal_p=True, return_lse=True)
    close([torch.cat(x) for x in got], batch, Asked(causal=True))
    got = wrapper.run(q[:200], cache, q[200:], cache, None, None, True, None, 0.5, 2.0, True)
    decodes = [Asked(factor=0.5, v_scale=2.0)] * 2
    close([torch.cat(x) for x in got], batch, [Asked(causal=True), *decodes])
