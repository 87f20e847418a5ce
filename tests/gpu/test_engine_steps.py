"""Decodes of an engine in a CUDA graph: each step is planned on the device before its replay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.engines.vllm.kinds import Kind
from warploom.engines.vllm.layers import Layer
from warploom.engines.vllm.sharing import HOST_SECONDS, Sharing, bandwidth
from warploom.engines.vllm.steps import Step

PAGE, REQUESTS, WIDTH = 16, 8, 40

pytestmark = pytest.mark.gpu


def step(lens: list[int], pages: torch.Tensor, host_knows: bool = True) -> Step:
    """One row for each request that has keys; the others fill the batch."""
    rows = [int(n > 0) for n in lens]
    qo = np.cumsum([0, *rows], dtype=np.int32)
    kv = np.array(lens, np.int32)
    return Step(
        page_size=PAGE, rows=REQUESTS, longest_q=1, longest_kv=int(kv.max()),
        qo_indptr=torch.from_numpy(qo).cuda(), kv_lens=torch.from_numpy(kv).cuda(), pages=pages,
        host_qo=qo, host_kv=kv if host_knows else None,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 100])
def test_a_replay_attends_to_the_step_that_was_planned_last(
    cuda: torch.device, window: int | None
) -> None:
    layer = Layer("model.layers.0.attn", 8, 2, 64, 0.125, window=window)
    most = wl.Bounds(REQUESTS, REQUESTS, WIDTH * PAGE, REQUESTS * WIDTH + 1)
    kind = Kind(layer, layer.variant, page_size=PAGE, dtype=torch.bfloat16, device=cuda,
                decode=most)  # fmt: skip
    kind.warm_up()
    cache = torch.randn(REQUESTS * WIDTH, 2, PAGE, 128, dtype=torch.bfloat16, device=cuda)
    kv = cache[..., :64], cache[..., 64:]
    q = torch.randn(REQUESTS, 8, 64, dtype=torch.bfloat16, device=cuda)
    out = torch.zeros_like(q)
    pages = torch.randperm(REQUESTS * WIDTH, device=cuda).int().view(REQUESTS, WIDTH)
    first = step([5, 600, 77, 16, 17, 1, 320, 33], pages)
    kind.run(first, q, kv, out, {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kind.run(first, q, kv, out, {})
    for lens in ([6, 601, 78, 17, 18, 2, 321, 34], [640, 1, 0, 0, 0, 0, 0, 0]):
        made = step(lens, pages)
        kind.plan(made)
        graph.replay()
        busy = sum(n > 0 for n in lens)
        reference = wl.AttentionWrapper(
            layer.variant, kv_format=wl.Paged(PAGE, layout="HND"), num_q_heads=8, num_kv_heads=2,
            head_dim=64, sm_scale=0.125, dtype="bfloat16", backend="reference",
        )  # fmt: skip
        reference.plan(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in made.on_host))
        expected = reference.run(q[:busy], kv)
        torch.testing.assert_close(out[:busy], expected, atol=2e-2, rtol=2e-2)


def test_steps_that_share_prefixes_read_them_once(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes beside a chunk of a prompt, with keys so slow that what is saved pays."""
    assert 1e11 < bandwidth(cuda) < 1e14  # bytes per second
    monkeypatch.setattr(Sharing, "of", lambda *_, **__: Sharing(4, HOST_SECONDS))
    layer = Layer("model.layers.0.attn", 8, 2, 64, 0.125, soft_cap=30.0)
    kind = Kind(layer, layer.variant, page_size=PAGE, dtype=torch.bfloat16, device=cuda)
    kind.warm_up()
    cache = torch.randn(REQUESTS * WIDTH, 2, PAGE, 128, dtype=torch.bfloat16, device=cuda)
    kv = cache[..., :64], cache[..., 64:]
    table = torch.arange(REQUESTS * WIDTH, device=cuda).int().view(REQUESTS, WIDTH)
    together = table.clone()
    together[:, : WIDTH - 4] = table[0, : WIDTH - 4]
    lens = [WIDTH * PAGE - 7 * i for i in range(REQUESTS)]
    for pages, shares in ((table, False), (together, True)):
        made = step(lens, pages)
        qo = np.array([*range(REQUESTS), REQUESTS + 99], np.int32)  # the last has 100 rows
        made.host_qo, made.qo_indptr = qo, torch.from_numpy(qo).to(cuda)
        made.rows, made.longest_q = int(qo[-1]), 100
        q = torch.randn(made.rows, 8, 64, dtype=torch.bfloat16, device=cuda)
        out = torch.zeros_like(q)
        kind.run(made, q, kv, out, {})
        assert (kind._last is not None and kind._last[1] is kind._shared) == shares
        reference = wl.AttentionWrapper(
            layer.variant, kv_format=wl.Paged(PAGE, layout="HND"), num_q_heads=8, num_kv_heads=2,
            head_dim=64, sm_scale=0.125, dtype="bfloat16", backend="reference",
        )  # fmt: skip
        reference.plan(*made.with_host_pages)
        torch.testing.assert_close(out, reference.run(q, kv), atol=2e-2, rtol=2e-2)
