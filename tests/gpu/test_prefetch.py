"""Prefetching on the GPU: results stay, and graphs hold it. benchmarks/prefetch.py times it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import page_tables

import warploom as wl
from warploom.codegen.prefetch import SPAN
from warploom.errors import ForbiddenUnderCapture
from warploom.prefetch import Overlap, SafeBudget, beside, beside_pages, prefetch
from warploom.runtime.launching.prefetch import SpanTable, cut

pytestmark = pytest.mark.gpu

MB = 10**6
PAGE, PAGES = 16, 2048
SHAPE: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}


def test_a_graph_holds_it_and_results_stay(cuda: Any) -> None:
    weights = [torch.randn(2048, 2048, device=cuda, dtype=torch.bfloat16) for _ in range(3)]
    x = torch.randn(4, 2048, device=cuda, dtype=torch.bfloat16)

    def model(fetches: bool) -> torch.Tensor:
        y = x
        for i, weight in enumerate(weights):
            if fetches:
                with beside(weights[i:], 8 * MB):
                    y = y * 2
            else:
                y = y * 2
            y = y @ weight
        return y

    expected = model(False)
    assert torch.equal(model(True), expected)
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        out = model(True)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("keep", [None, False, True])
def test_marks_change_nothing(cuda: Any, keep: bool | None) -> None:
    weight = torch.randn(7168, 8192, device=cuda, dtype=torch.bfloat16)  # more than half of any L2
    x = torch.randn(1, 8192, device=cuda, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x, weight)

    def step() -> torch.Tensor:
        with beside(weight, 8 * MB, keep=keep) as asked:
            pass
        assert asked == 8 * MB
        return torch.nn.functional.linear(x, weight)

    step()
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        out = step()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


def test_new_tensors_are_refused_under_capture(cuda: Any) -> None:
    x, y = torch.zeros(2, 1000, device=cuda)
    prefetch(x, 1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefetch(x, 1000)
        with pytest.raises(ForbiddenUnderCapture):
            prefetch(y, 1000)
    graph.replay()
    torch.cuda.synchronize()


def test_a_table_is_kept_as_long_as_the_graphs_that_read_it(cuda: Any) -> None:
    from warploom.serving.prefetch import tensors as module

    x = torch.zeros(1000, device=cuda)
    prefetch(x, 1000)
    table = list(module._tables._known.values())[-1]

    def captured() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            prefetch(x, 1000)
        return graph

    graphs = [captured(), captured()]

    def is_kept() -> bool:
        module._tables._of_graphs.drop_released()
        return table in module._tables._of_graphs

    graphs.pop(0)
    torch.cuda.synchronize()
    assert is_kept()
    graphs[0].replay()
    torch.cuda.synchronize()
    graphs.clear()
    deadline = time.monotonic() + 60  # however busy the host is
    while is_kept() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_kept()


def test_a_graph_holds_what_is_chosen(cuda: Any) -> None:
    """A prefetch where it pays by these constants, of no GPU, and none where it does not."""
    overlap = Overlap(1e12, 1e-6, 1e11, 8e6, 1e15, 0.0, 0.0, 0.0)
    weight = torch.randn(1024, 4096, device=cuda, dtype=torch.float16)
    x = torch.randn(1, 4096, device=cuda, dtype=torch.float16)
    asked = []

    def step() -> torch.Tensor:
        for seconds in (0.5e-6, 20e-6):
            with beside(weight, SafeBudget(overlap, seconds)) as size:
                y = 2 * x
            asked.append(size)
        return torch.nn.functional.linear(y, weight)

    expected = step().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    assert torch.equal(out, expected) and asked == [0, 8_000_000 // 128 * 128] * 2


def batch(lens: list[int], seed: int) -> tuple[Any, ...]:
    pages = [-(-n // PAGE) for n in lens]
    order = np.random.default_rng(seed).permutation(PAGES)[: sum(pages)]
    last = [(n - 1) % PAGE + 1 for n in lens]
    return list(range(len(lens) + 1)), np.cumsum([0, *pages]), order, last


def test_tables_are_read_behind_their_writing_and_written_behind_reads(cuda: Any) -> None:
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    table = SpanTable(torch.device("cuda", torch.cuda.current_device()), 1)
    seen = []
    torch.cuda.synchronize()
    for size in (128, 256, 512):
        records = cut(np.zeros(1, np.int64), np.array([size]), np.zeros(1, np.int64), size)
        with torch.cuda.stream(busy):
            torch.cuda._sleep(50_000_000)
            table.write(records)
        with torch.cuda.stream(other), table.read_by(other):
            torch.cuda._sleep(50_000_000)
            seen.append(table._memory.clone())
    torch.cuda.synchronize()
    found = [x.cpu().numpy().view(SPAN)["bytes"][1] for x in seen]
    assert found == [128, 256, 512]


def test_a_captured_prefetch_follows_the_plan(cuda: Any) -> None:
    bounds = wl.Bounds(max_requests=8, max_q_rows=8, max_kv_len=4000, max_blocks=PAGES)
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(PAGE), bounds=bounds, cuda_graph=True, device=cuda, **SHAPE
    )
    eager = wl.AttentionWrapper(wl.Causal(), kv_format=wl.Paged(PAGE), device=cuda, **SHAPE)
    cache = torch.randn(PAGES, 2, PAGE, 2, 128, device=cuda, dtype=torch.bfloat16)
    q = torch.randn(8, 8, 128, device=cuda, dtype=torch.bfloat16)
    attention.plan(*batch([700, *[30] * 7], 0))  # as many rows as any

    def step() -> torch.Tensor:
        with beside_pages(attention, cache, 16 * MB):
            doubled = q * 2
        return attention.run(doubled, cache)

    step()
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        out = step()
    for seed, lens in enumerate([[700, 30, 2000], [1], [3999] * 5, [16] * 8]):
        given = batch(lens, seed)
        attention.plan(*given)
        eager.plan(*given)
        graph.replay()
        wanted = eager.run(q[: len(lens)] * 2, cache)
        torch.testing.assert_close(out[: len(lens)], wanted, rtol=2e-2, atol=2e-2)
        read = set(given[2].tolist())
        (pages,) = page_tables(attention)
        records = pages.table.read()
        step_bytes = cache.stride(0) * cache.element_size()
        assert set((records["offset"] // step_bytes).tolist()) <= read
