"""Selected pages on the GPU: selections change inside a captured graph, which holds no plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.codegen.attention import templates
from warploom.errors import IndexOutOfRange, NotPlanned
from warploom.runtime.devices.device import cuda_facts

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, PAGES, REQUESTS, BUDGET = 8, 4, 128, 512, 6, 40


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("rows", "heads"), [(1, KV_HEADS), (1, HEADS), (5, HEADS), (40, HEADS)])
def test_selections_change_between_replays(
    cuda: Any, page_size: int, rows: int, heads: int
) -> None:
    rng = np.random.default_rng(rows)
    declared: dict[str, Any] = {
        "kv_format": wl.Paged(page_size), "num_q_heads": heads, "num_kv_heads": KV_HEADS,
        "head_dim": DIM, "dtype": "bfloat16",
    }  # fmt: skip
    cache = torch.randn(2, PAGES, page_size, KV_HEADS, DIM).bfloat16()
    q = torch.randn(REQUESTS * rows, heads, DIM).bfloat16()
    counts = rng.integers(1, BUDGET + 1, REQUESTS)
    indptrs = np.arange(REQUESTS + 1) * rows, np.cumsum([0, *counts])
    last = rng.integers(1, page_size + 1, REQUESTS)
    on_cpu = wl.PageSelectionWrapper(wl.Causal(), **declared, device="cpu")
    on_gpu = wl.PageSelectionWrapper(wl.Causal(), **declared, device=cuda)
    scores = torch.rand(REQUESTS, KV_HEADS, PAGES, device=cuda)
    selection = torch.zeros(REQUESTS, KV_HEADS, BUDGET, dtype=torch.int32, device=cuda)
    on_gpu.plan(*indptrs, selection, last)
    q_gpu, cache_gpu, out = q.to(cuda), tuple(cache.to(cuda)), torch.empty_like(q, device=cuda)

    def step() -> None:
        selection.copy_(scores.topk(BUDGET, dim=-1).indices)  # as a model would choose them
        on_gpu.run(q_gpu, cache_gpu, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        step()
    for _ in range(3):
        scores.uniform_()
        out.fill_(7.0)
        graph.replay()
        on_cpu.plan(*indptrs, selection.cpu(), last)
        expected = on_cpu.run(q, tuple(cache))
        torch.testing.assert_close(out.cpu(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "tile",
    [
        wl.TileConfig(128, 128, 8, 2, "hopper", 2, decode=wl.TileConfig(8, 160, 5, 2)),
        wl.TileConfig(128, 128, 8, 2, "hopper", 2, decode=wl.TileConfig(16, 160, 5, 2)),
        wl.TileConfig(64, 64, 4, 2, decode=wl.TileConfig(16, 64, 2, 2)),
    ],
    ids=["8 rows", "16 rows", "portable"],
)
def test_tiles_of_two_roles_read_selections(cuda: Any, tile: wl.TileConfig, page_size: int) -> None:
    """A mix and either role alone, of which each head of each request reads pages of its own."""
    if tile.template == "hopper" and not templates.HOPPER.compiles_for(cuda_facts(cuda.index).arch):
        pytest.skip("its tile needs sm_90a")
    rng = np.random.default_rng(page_size)
    declared: dict[str, Any] = {
        "kv_format": wl.Paged(page_size), "num_q_heads": HEADS, "num_kv_heads": KV_HEADS,
        "head_dim": DIM, "dtype": "bfloat16",
    }  # fmt: skip
    cache = torch.randn(2, PAGES, page_size, KV_HEADS, DIM).bfloat16()
    on_cpu = wl.PageSelectionWrapper(wl.Causal(), **declared, device="cpu")
    on_gpu = wl.PageSelectionWrapper(wl.Causal(), **declared, device=cuda, tile=tile)
    for q_lens, roles in (
        ((300, 1, 1, 2, 0, 90), {0, 1}),
        ((1,) * REQUESTS, {1}),
        ((70, 200), {0}),
    ):
        q = torch.randn(sum(q_lens), HEADS, DIM).bfloat16()
        counts = rng.integers(1, BUDGET + 1, len(q_lens))
        indptrs = np.cumsum([0, *q_lens]), np.cumsum([0, *counts])
        last = rng.integers(1, page_size + 1, len(q_lens))
        scores = torch.rand(len(q_lens), KV_HEADS, PAGES)
        selection = scores.topk(BUDGET, dim=-1).indices.int()
        on_cpu.plan(*indptrs, selection, last)
        on_gpu.plan(*indptrs, selection.to(cuda), last)
        assert on_gpu.planned is not None
        assert set(on_gpu.planned.plan.role.tolist()) == roles
        out = on_gpu.run(q.to(cuda), tuple(cache.to(cuda)))
        torch.testing.assert_close(out.cpu(), on_cpu.run(q, tuple(cache)), rtol=2e-2, atol=2e-2)


def test_entries_outside_of_the_cache_are_found_when_asked_for(cuda: Any) -> None:
    attention = wl.PageSelectionWrapper(
        wl.Causal(), kv_format=wl.Paged(16), num_q_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM, dtype="bfloat16", device=cuda,
    )  # fmt: skip
    cache = torch.zeros(PAGES, 2, 16, KV_HEADS, DIM, dtype=torch.bfloat16, device=cuda)
    with pytest.raises(NotPlanned):
        attention.check_selection(cache)
    selection = torch.zeros(2, KV_HEADS, BUDGET, dtype=torch.int32, device=cuda)
    attention.plan([0, 1, 2], [0, 3, 3 + BUDGET], selection, [16, 16])
    selection[0, :, 3:] = PAGES  # never read
    attention.check_selection(cache)
    selection[0, 2, 1] = PAGES
    with pytest.raises(IndexOutOfRange, match=rf"kv_indices\[0, 2, 1\] is {PAGES}"):
        attention.check_selection(tuple(cache.unbind(1)))
