"""Rolling caches in CUDA graphs: a sequence grows around its ring between replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom as wl

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM = 8, 2, 64
SHAPE: dict[str, Any] = {
    "num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("positions", ["sequence", "cache"])
def test_replays_follow_sequences_around_their_rings(cuda: Any, positions: Any) -> None:
    ring = wl.Rolling(50, 4, positions=positions)
    bounds = wl.Bounds(max_requests=3, max_q_rows=3, max_kv_len=400, max_blocks=3 * ring.slots)
    declared: dict[str, Any] = {"kv_format": ring, **SHAPE}
    variant = wl.Causal() & wl.Rope() & wl.Alibi()
    graphed = wl.AttentionWrapper(variant, bounds=bounds, cuda_graph=True, device=cuda, **declared)
    on_cpu = wl.AttentionWrapper(variant, device="cpu", **declared)
    caches = torch.zeros(2, 3, ring.slots, KV_HEADS, DIM, device=cuda, dtype=torch.bfloat16)
    q = torch.randn(3, HEADS, DIM, device=cuda, dtype=torch.bfloat16)
    out, rows = torch.empty_like(q), torch.arange(3, device=cuda)
    lengths = torch.tensor([0, 37, 300])

    def grow() -> list[int]:
        """One token more for each request, and a plan."""
        slots = ring.slot_of(lengths.to(cuda))
        caches[:, rows, slots] = torch.randn(2, 3, KV_HEADS, DIM, device=cuda).bfloat16()
        lengths.add_(1)
        ends = [0, *lengths.cumsum(0).tolist()]
        graphed.plan([0, 1, 2, 3], ends)
        return ends

    grow()
    graphed.run(q, tuple(caches), out=out)
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        graphed.run(q, tuple(caches), out=out)
    for step in range(70):
        ends = grow()
        q.normal_()
        graph.replay()
        if step % 10 < 3:
            on_cpu.plan([0, 1, 2, 3], ends)
            expected = on_cpu.run(q.cpu(), tuple(caches.cpu()))
            torch.testing.assert_close(out.cpu(), expected, atol=2e-2, rtol=2e-2)
