"""CUDA graphs: captured once, replayed for other plans, without a compile or an allocation."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import BoundsExceeded, ForbiddenUnderCapture, IndexOutOfRange, NotPlanned

pytestmark = pytest.mark.gpu

SHAPE: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
PAGE, PAGES, ROWS, REQUESTS, LONGEST = 16, 2048, 96, 16, 12_000
BOUNDS = wl.Bounds(max_requests=REQUESTS, max_q_rows=ROWS, max_kv_len=LONGEST, max_blocks=PAGES)
# (q_lens, kv_lens) of each replay; the first is captured
BATCHES = [
    ((6,) * 16, (700,) * 16),
    ((1,) * 16, (1, 2, 3, 15, 16, 17, 500, 900, 64, 65, 1, 1, 1, 1, 2000, 12)),
    ((), ()),
    ((1,), (LONGEST,)),
    ((96,), (300,)),
    ((0, 3, 0), (50, 0, 0)),
    ((13, 0, 3), (300, 50, 5000)),
    ((40, 1, 1, 20), (5000, 9000, 1, 20)),
    ((), ()),
    ((2,) * 16, (1900,) * 16),
]


def paged(q_lens: Any, kv_lens: Any, seed: int) -> dict[str, Any]:
    pages = [-(-n // PAGE) for n in kv_lens]
    order = np.random.default_rng(seed).permutation(PAGES)
    return {
        "qo_indptr": np.cumsum([0, *q_lens]),
        "kv_indptr": np.cumsum([0, *pages]),
        "kv_indices": np.resize(order, sum(pages)),  # beyond all pages, requests share them
        "last_page_len": np.array([(n - 1) % PAGE + 1 if n else 0 for n in kv_lens], np.int32),
    }


def allocations() -> int:
    torch.cuda.synchronize()
    found: int = torch.cuda.memory_stats()["allocation.all.allocated"]
    return found


@pytest.mark.parametrize(("kv_heads", "most_rows"), [(2, ROWS), (8, REQUESTS)])
def test_one_graph_serves_all_batches_within_the_bounds(
    kv_heads: int, most_rows: int, cuda: Any
) -> None:
    """In the second case bounds speak of decoding without groups, which has tiles of one row."""
    variant = wl.Causal() & wl.SlidingWindow(3000) & wl.SoftCap(20.0)
    shape = {**SHAPE, "kv_format": wl.Paged(PAGE), "num_kv_heads": kv_heads, "device": cuda}
    bounds = replace(BOUNDS, max_q_rows=most_rows)
    graphed = wl.AttentionWrapper(variant, bounds=bounds, cuda_graph=True, **shape)
    eager = wl.AttentionWrapper(variant, **shape)
    q = torch.randn(most_rows, 8, 128, device=cuda, dtype=torch.bfloat16)
    cache = torch.randn(PAGES, 2, PAGE, kv_heads, 128, device=cuda, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    lse = torch.empty(most_rows, 8, device=cuda)
    eager.warm_up()
    batches = [batch for batch in BATCHES if sum(batch[0]) <= most_rows]
    graphed.plan(**paged(*batches[0], seed=0))
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        graphed.run(q, cache, out=out, lse=lse)
    for seed, (q_lens, kv_lens) in enumerate(batches * 3):
        batch = paged(q_lens, kv_lens, seed)
        eager.plan(**batch)
        rows = sum(q_lens)
        expected, sums = eager.run(q[:rows], cache, return_lse=True)
        out.fill_(7.0)
        lse.fill_(7.0)
        before = allocations()
        with wl.forbid_compilation():
            graphed.plan(**batch)
            graph.replay()
        assert allocations() == before
        torch.testing.assert_close(out[:rows], expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[:rows], sums, atol=1e-3, rtol=1e-3)
        assert (out[rows:] == 7.0).all()  # rows of no request stay untouched
        assert (lse[rows:] == 7.0).all()
        for _ in range(2):  # the counters are zero again after each launch
            again = out.clone()
            graph.replay()
            assert torch.equal(out, again)


def test_a_graph_is_captured_with_the_rows_of_the_bounds_over_a_smaller_batch(cuda: Any) -> None:
    shape = {**SHAPE, "kv_format": wl.Paged(PAGE), "device": cuda}
    graphed = wl.AttentionWrapper(wl.Causal(), bounds=BOUNDS, cuda_graph=True, **shape)
    eager = wl.AttentionWrapper(wl.Causal(), **shape)
    q = torch.randn(ROWS, 8, 128, device=cuda, dtype=torch.bfloat16)
    cache = torch.randn(PAGES, 2, PAGE, 2, 128, device=cuda, dtype=torch.bfloat16)
    out = torch.full_like(q, 7.0)
    graphed.plan(**paged((1, 2), (30, 40), seed=0))
    graphed.run(q, cache, out=out)
    assert (out[3:] == 7.0).all() and not (out[:3] == 7.0).all(dim=-1).any()
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        graphed.run(q, cache, out=out)
    for seed, q_lens in enumerate(((1, 2), (5, 1, 1), (3,))):
        batch = paged(q_lens, [40] * len(q_lens), seed)
        graphed.plan(**batch)
        out.fill_(7.0)
        graph.replay()
        eager.plan(**batch)
        rows = sum(q_lens)
        torch.testing.assert_close(out[:rows], eager.run(q[:rows], cache), atol=2e-2, rtol=2e-2)
        assert (out[rows:] == 7.0).all()


def test_beyond_the_bounds_nothing_moves(cuda: Any) -> None:
    graphed = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(PAGE), device=cuda, bounds=BOUNDS, cuda_graph=True, **SHAPE
    )
    q = torch.randn(ROWS, 8, 128, device=cuda, dtype=torch.bfloat16)
    cache = torch.randn(PAGES, 2, PAGE, 2, 128, device=cuda, dtype=torch.bfloat16)
    graphed.plan(**paged(*BATCHES[0], seed=0))
    before = graphed.run(q, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = graphed.run(q, cache)
    for q_lens, kv_lens in (
        ((1,) * 17, (1,) * 17),
        ((97,), (1,)),
        ((1,), (LONGEST + 1,)),
        ((1, 1, 1), (11_000, 11_000, 11_000)),
    ):
        with pytest.raises(BoundsExceeded):
            graphed.plan(**paged(q_lens, kv_lens, seed=0))
        with pytest.raises(NotPlanned):
            graphed.run(q, cache)
        graph.replay()  # still reads the last good plan
        assert torch.equal(out, before)
    graphed.plan(**paged(*BATCHES[0], seed=0))
    assert torch.equal(graphed.run(q, cache), before)


def test_values_of_the_mask_reach_the_graph(cuda: Any) -> None:
    bounds = wl.Bounds(max_requests=4, max_q_rows=40, max_kv_len=600)
    shape = {"device": cuda, **SHAPE}
    graphed = wl.AttentionWrapper(wl.PrefixLM(), bounds=bounds, cuda_graph=True, **shape)
    eager = wl.AttentionWrapper(wl.PrefixLM(), **shape)
    q = torch.randn(40, 8, 128, device=cuda, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1200, 2, 128, device=cuda, dtype=torch.bfloat16)
    qo, kv = np.array([0, 10, 20, 30, 40]), np.array([0, 300, 600, 900, 1200])
    graphed.plan(qo, kv, prefix_len=[0, 0, 0, 0])
    graphed.run(q, (k, v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = graphed.run(q, (k, v))
    for prefix in ([0, 300, 100, 295], [5, 6, 7, 8], [300, 300, 300, 300]):
        graphed.plan(qo, kv, prefix_len=prefix)
        graph.replay()
        eager.plan(qo, kv, prefix_len=prefix)
        torch.testing.assert_close(out, eager.run(q, (k, v)), atol=2e-2, rtol=2e-2)


def test_planning_is_refused_under_capture(cuda: Any) -> None:
    attention = wl.AttentionWrapper(wl.Causal(), device=cuda, **SHAPE)
    q, k, v = (torch.zeros(4, n, 128, device=cuda, dtype=torch.bfloat16) for n in (8, 2, 2))
    graph = torch.cuda.CUDAGraph()
    attention.plan([0, 4], [0, 4])
    with torch.cuda.graph(graph):
        attention.run(q, (k, v))
        with pytest.raises(ForbiddenUnderCapture, match=r"plan\(\) was called while"):
            attention.plan([0, 4], [0, 4])
    graph.replay()


def test_attention_is_captured_with_the_plan_it_has(cuda: Any) -> None:
    variant = wl.Causal()
    q = torch.randn(2, 5, 8, 64, device=cuda, dtype=torch.float16)
    k, v = torch.randn(2, 2, 300, 2, 64, device=cuda, dtype=torch.float16)
    expected = wl.attention(q, k, v, variant=variant)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ForbiddenUnderCapture, match="lengths that it has no plan for"):
            wl.attention(q[:, :3], k, v, variant=variant)
        out = wl.attention(q, k, v, variant=variant)
    other = wl.attention(
        q[:, :2], k[:, :7], v[:, :7], variant=variant
    )  # plans a wrapper of its own
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(other, wl.attention(q[:, :2], k[:, :7], v[:, :7], variant=variant))


def test_a_graph_of_attention_keeps_copies_of_host_tensors(cuda: Any) -> None:
    q = torch.randn(2, 3, 8, 64, device=cuda, dtype=torch.float16)
    k, v = torch.randn(2, 2, 70, 2, 64, device=cuda, dtype=torch.float16)
    layers = [wl.Alibi(torch.rand(8)) for _ in range(3)]
    expected = [wl.attention(q, k, v, variant=layer) for layer in layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [wl.attention(q, k, v, variant=layer) for layer in layers]
    layers.clear()
    gc.collect()
    spoilt = [torch.full((8,), 9.0, device=cuda) for _ in range(20_000)]  # takes what is free
    graph.replay()
    torch.cuda.synchronize()
    assert len(spoilt) == 20_000
    for out, wanted in zip(outs, expected, strict=True):
        assert torch.equal(out, wanted)


def test_a_plan_of_attention_lives_as_long_as_the_graphs_that_captured_it(cuda: Any) -> None:
    from warploom.runtime.calls import attention as module

    q = torch.randn(2, 3, 8, 64, device=cuda, dtype=torch.float16)
    k, v = torch.randn(2, 2, 50, 2, 64, device=cuda, dtype=torch.float16)
    expected = wl.attention(q, k, v, variant=wl.Causal())
    known = list(module._captured)  # their graphs may go at any time: destructors run on a thread

    def held() -> int:
        module._captured.drop_released()
        return sum(all(one is not other for other in known) for one in module._captured)

    def captured() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [wl.attention(q, k, v, variant=wl.Causal()) for _ in range(3)]
        return graph, outs[-1]

    graphs = [captured()[0]]
    second, out = captured()
    graphs.append(second)
    assert held() == 1
    graphs.pop(0)
    torch.cuda.synchronize()
    assert held() == 1
    out.zero_()
    graphs[0].replay()
    assert torch.equal(out, expected)
    del second
    graphs.clear()
    torch.cuda.synchronize()
    deadline = time.monotonic() + 60  # however busy the host is
    while held() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held() == 0


def test_a_captured_plan_may_come_before_any_replay(cuda: Any) -> None:
    """It only records that counters are cleared for its layout; the next plan clears them again."""
    shape = {**SHAPE, "kv_format": wl.Paged(PAGE), "device": cuda}
    attention = wl.AttentionWrapper(wl.Causal(), bounds=BOUNDS, **shape)
    alone = wl.AttentionWrapper(wl.Causal(), **shape)
    q = torch.randn(2, 8, 128, dtype=torch.bfloat16, device=cuda)
    cache = torch.randn(PAGES, 2, PAGE, 2, 128, dtype=torch.bfloat16, device=cuda)
    args = paged((1, 1), (9000, 4000), 1)
    lengths = {n: torch.as_tensor(x, dtype=torch.int32, device=cuda) for n, x in args.items()}
    attention.plan(**paged((1, 1), (40, 40), 0))  # another layout, by the host
    attention.run(q, cache)
    attention.plan(**lengths, q_rows=2)  # what the device plans with is built
    attention.plan(**paged((1, 1), (40, 40), 0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.plan(**lengths, q_rows=2)
        out = attention.run(q, cache)
    attention.plan(**lengths, q_rows=2)
    alone.plan(**args)
    expected = alone.run(q, cache)
    torch.testing.assert_close(attention.run(q, cache), expected, rtol=2e-2, atol=2e-2)
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_a_cache_too_small_does_not_end_a_capture(cuda: Any) -> None:
    shape = {**SHAPE, "kv_format": wl.Paged(PAGE), "device": cuda}
    attention = wl.AttentionWrapper(wl.Causal(), **shape)
    q = torch.randn(2, 8, 128, dtype=torch.bfloat16, device=cuda)
    cache = torch.randn(PAGES, 2, PAGE, 2, 128, dtype=torch.bfloat16, device=cuda)
    attention.plan(**paged((1, 1), (900, 400), 1))
    expected = attention.run(q, cache).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(IndexOutOfRange, match="kv_indices"):
            attention.run(q, cache[:5])
        out = attention.run(q, cache)
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out, expected)
