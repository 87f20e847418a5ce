"""Graph pools on a device: replays, plans that change, memory that is shared and comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import ForbiddenUnderCapture
from warploom.graph_errors import BudgetBelowCapture, CaptureFailed

pytestmark = pytest.mark.gpu

WIDTH, MOST = 256, 32
BOUNDS = wl.Bounds(max_requests=MOST + 1, max_q_rows=MOST, max_kv_len=2048, max_blocks=512)
INPUTS = {"x": wl.GraphInput(torch.float32, (WIDTH,))}


class Layers:
    """Products with a part in the middle that partial mode leaves out."""

    def __init__(self, device: torch.device, wide: int = 4 * WIDTH) -> None:
        self.up = torch.randn(WIDTH, wide, device=device) * WIDTH**-0.5
        self.down = torch.randn(wide, WIDTH, device=device) * wide**-0.5

    def first(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x @ self.up).relu(), x

    def middle(self, h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, h

    def last(self, x: torch.Tensor, h: torch.Tensor) -> Any:
        return h @ self.down + x

    def expected(self, x: torch.Tensor) -> Any:
        return (x @ self.up).relu() @ self.down + x * 2

    def pool(self, device: torch.device, **options: Any) -> wl.GraphPool:
        step: list[Any] = [self.first, wl.GraphPiece(self.middle, "full"), self.last]
        return wl.GraphPool(step, INPUTS, BOUNDS, device=device, **options)


@pytest.mark.parametrize("mode", ["full", "partial"])
def test_batches_of_all_sizes_give_what_the_step_gives(mode: str, cuda: Any) -> None:
    layers = Layers(cuda)
    pool = layers.pool(cuda)
    generator = np.random.default_rng(0)
    for rows in generator.integers(1, MOST + 1, 60).tolist():
        x = torch.randn(rows, WIDTH, device=cuda)
        out = pool.run({"x": x}, mode=mode)
        torch.testing.assert_close(out, layers.expected(x), atol=1e-2, rtol=1e-2)
    before = torch.cuda.memory_allocated(cuda)
    layers.down.mul_(-1)  # read where it lies
    x = torch.randn(7, WIDTH, device=cuda)
    out = pool.run({"x": x}, mode=mode)
    torch.testing.assert_close(out, layers.expected(x), atol=1e-2, rtol=1e-2)
    assert pool.stats().captures <= len(pool.buckets)
    del out, x
    assert torch.cuda.memory_allocated(cuda) <= before


@pytest.mark.parametrize("full_rows", [None, 0], ids=["full", "partial"])
def test_decoding_follows_each_plan(full_rows: int | None, cuda: Any) -> None:
    heads, kv_heads, dim, page, pages = 8, 2, 128, 16, 512
    shape: dict[str, Any] = {
        "kv_format": wl.Paged(page), "num_q_heads": heads, "num_kv_heads": kv_heads,
        "head_dim": dim, "dtype": "bfloat16", "device": cuda,
    }  # fmt: skip
    graphed = wl.AttentionWrapper(wl.Causal(), bounds=BOUNDS, cuda_graph=True, **shape)
    eager = wl.AttentionWrapper(wl.Causal(), **shape)
    cache = torch.randn(pages, 2, page, kv_heads, dim, device=cuda, dtype=torch.bfloat16)

    def scaled(q: torch.Tensor) -> torch.Tensor:
        return q * 0.5

    def attend(q: torch.Tensor) -> torch.Tensor:
        return graphed.run(q, cache)

    step: list[Any] = [scaled, wl.GraphPiece(attend, "full"), lambda out: out * 4]
    inputs = {"q": wl.GraphInput(torch.bfloat16, (heads, dim))}
    pool = wl.GraphPool(step, inputs, BOUNDS, device=cuda, full_rows=full_rows)
    generator = np.random.default_rng(1)
    for rows in (3, 32, 1, 7, 20, 3, 31, 5, 32):
        lens = generator.integers(1, 250, rows)
        tables = [-(-n // page) for n in lens]
        ends = np.cumsum([0, *tables]).tolist()
        listed = generator.permutation(pages)[: ends[-1]].tolist()
        last = [int((n - 1) % page + 1) for n in lens]
        padded = pool.choose(rows).padded_rows
        more = padded > rows
        graphed.plan(
            [*range(rows + 1), *[padded] * more], [*ends, *[ends[-1]] * more],
            kv_indices=listed, last_page_len=[*last, *[0] * more],
        )  # fmt: skip
        q = torch.randn(rows, heads, dim, device=cuda, dtype=torch.bfloat16)
        with torch.inference_mode():
            out = pool.run({"q": q}).clone()
        eager.plan(list(range(rows + 1)), ends, kv_indices=listed, last_page_len=last)
        torch.testing.assert_close(out, eager.run(q * 0.5, cache) * 4, atol=5e-2, rtol=5e-2)
    assert pool.stats().captures == len({pool.choose(n).padded_rows for n in (1, 3, 7, 20)}) == 4


def give_back() -> None:
    """All that torch holds and nothing uses: cuBLAS has 32 MiB for each stream that it was on."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def test_captures_share_memory_and_give_it_back(cuda: Any) -> None:
    layers = Layers(cuda, wide=1 << 18)  # 32 MiB of results at 32 rows
    give_back()
    before = torch.cuda.memory_reserved(cuda)
    pool = layers.pool(cuda)
    assert pool.warm_up(progress=False) == len(pool.buckets) == 6
    shared, alone = pool.stats().shared_bytes, 2 * (32 << 20)
    assert 32 << 20 <= shared <= alone + (16 << 20)  # products, and what is made of them
    pool.close()
    buffers = pool.stats().buffer_bytes
    give_back()
    assert torch.cuda.memory_reserved(cuda) - before <= buffers + (8 << 20)


def test_budgets_evict_and_captures_come_again(cuda: Any) -> None:
    layers = Layers(cuda, wide=1 << 16)
    probe = layers.pool(cuda, buckets=[8])
    probe.warm_up(progress=False)
    one = probe.stats()
    probe.close()
    with pytest.raises(BudgetBelowCapture):
        layers.pool(cuda, max_bytes=1024).run({"x": torch.randn(8, WIDTH, device=cuda)})
    budget = max(4 * (one.shared_bytes + one.own_bytes), 16 << 20)
    pool = layers.pool(cuda, buckets=[1, 2, 4, 8], max_bytes=budget)
    for rows in (8, 1, 4, 2, 8, 3, 1) * 3:
        x = torch.randn(rows, WIDTH, device=cuda)
        out = pool.run({"x": x})
        torch.testing.assert_close(out, layers.expected(x), atol=1e-2, rtol=1e-2)
        stats = pool.stats()
        assert stats.shared_bytes + stats.own_bytes <= budget


def test_what_cannot_be_captured_leaves_all_else_as_it_was(cuda: Any) -> None:
    layers = Layers(cuda)

    def looks(x: torch.Tensor) -> Any:
        return layers.expected(x) if x.sum().item() > -1e9 else x

    x = torch.randn(5, WIDTH, device=cuda)
    good = layers.pool(cuda)
    good.run({"x": x})
    bad = wl.GraphPool(looks, INPUTS, BOUNDS, device=cuda)
    for _ in range(2):
        with pytest.raises(CaptureFailed):
            bad.run({"x": x})
    falling = wl.GraphPool(looks, INPUTS, BOUNDS, device=cuda, on_failure="eager")
    for pool in (falling, falling, good):
        out = pool.run({"x": x})
        torch.testing.assert_close(out, layers.expected(x), atol=1e-2, rtol=1e-2)
    assert falling.stats().failures == 1
    graph = torch.cuda.CUDAGraph()
    static = x.clone()
    with torch.cuda.graph(graph):
        static.mul_(2)
        with pytest.raises(ForbiddenUnderCapture):
            good.run({"x": x})
    graph.replay()
    assert torch.equal(static, x * 2)


def test_attention_without_a_graph_is_refused(cuda: Any) -> None:
    """Its tile, grid and memory would be those of the first plan for good."""
    shape: dict[str, Any] = {
        "kv_format": wl.Paged(16), "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128,
        "dtype": "bfloat16", "device": cuda,
    }  # fmt: skip
    attention = wl.AttentionWrapper(wl.Causal(), **shape)
    cache = torch.randn(8, 2, 16, 2, 128, device=cuda, dtype=torch.bfloat16)
    attention.plan([0, 1, 2], [0, 1, 2], kv_indices=[3, 5], last_page_len=[4, 9])
    q = torch.randn(2, 8, 128, device=cuda, dtype=torch.bfloat16)
    alone = attention.run(q, cache)

    def step(q: torch.Tensor) -> Any:
        return attention.run(q, cache)

    inputs = {"q": wl.GraphInput(torch.bfloat16, (8, 128))}
    pool = wl.GraphPool(step, inputs, BOUNDS, device=cuda)
    for _ in range(2):
        with pytest.raises(CaptureFailed, match="cuda_graph=True and bounds"):
            pool.run({"q": q})
    falling = wl.GraphPool(step, inputs, BOUNDS, device=cuda, on_failure="eager")
    assert torch.equal(falling.run({"q": q}), alone)
    assert torch.equal(attention.run(q, cache), alone)


def test_streams_may_change_between_batches(cuda: Any) -> None:
    layers = Layers(cuda, wide=1 << 16)
    pool = layers.pool(cuda)
    side = torch.cuda.Stream(cuda)  # type: ignore[no-untyped-call]
    for turn in range(20):
        stream = side if turn % 2 else torch.cuda.current_stream(cuda)
        with torch.cuda.stream(stream):
            x = torch.randn(MOST - turn, WIDTH, device=cuda)
            out = pool.run({"x": x}).clone()
            torch.testing.assert_close(out, layers.expected(x), atol=1e-2, rtol=1e-2)
