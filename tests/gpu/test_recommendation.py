"""Beam searches on the GPU: what beams read, and masks. benchmarks/beams.py times them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.recommendation import BeamPages, BeamSearch, ItemMask, ItemTable

pytestmark = pytest.mark.gpu

PREFIX, WIDTH, HEADS, KV_HEADS, DIM = 1030, 128, 8, 2, 128


@pytest.mark.parametrize("page", [1, 16])
def test_reordered_beams_read_their_own_keys(cuda: Any, page: int) -> None:
    """Each beam's keys are followed in a plain tensor, which is gathered at each step."""
    rng, steps = np.random.default_rng(0), 3
    first = -(-PREFIX // page)
    own = first + np.arange(BeamPages.pages_needed(WIDTH, steps, PREFIX, page))
    pages = BeamPages(np.arange(first), PREFIX, own, page_size=page, width=WIDTH)
    shape = (first + len(own), 2, page, KV_HEADS, DIM)
    cache = torch.zeros(shape, device=cuda, dtype=torch.bfloat16)
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Composed(page), num_q_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM, dtype="bfloat16", device=cuda,
    )  # fmt: skip

    def fresh(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, DIM, device=cuda, dtype=torch.bfloat16)

    k, v = fresh(PREFIX, KV_HEADS)[None], fresh(PREFIX, KV_HEADS)[None]  # [beams, tokens, ..]
    wl.append(k[0], v[0], cache, [0, PREFIX], **pages.tables())
    for _ in range(steps):
        parents = rng.integers(0, len(k), WIDTH)
        pages.advance(parents).apply(cache)
        tables, indptr = pages.tables(), np.arange(WIDTH + 1)
        q, new_k, new_v = (fresh(WIDTH, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
        wl.append(new_k, new_v, cache, indptr, **tables)
        attention.plan(indptr, **tables)
        out = attention.run(q, cache)
        at = torch.from_numpy(parents).to(cuda)
        k, v = (torch.cat((x[at], new[:, None]), 1) for x, new in ((k, new_k), (v, new_v)))
        wide_k, wide_v = (x.float().repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
        weights = (torch.einsum("bhd,bnhd->bhn", q.float(), wide_k) * DIM**-0.5).softmax(-1)
        expected = torch.einsum("bhn,bnhd->bhd", weights, wide_v)
        assert float((out.float() - expected).norm() / expected.norm()) < 1e-2


def test_a_search_on_the_gpu_is_that_of_the_cpu(cuda: Any) -> None:
    rng, vocab = np.random.default_rng(1), 512
    items = np.unique(rng.integers(0, vocab, (20_000, 3)), axis=0)
    table = ItemTable(items, vocab)
    searches = [BeamSearch(ItemMask(table, WIDTH, device), WIDTH) for device in ("cpu", cuda)]
    for _ in range(3):
        logits = 3 * torch.randn(len(searches[0]), vocab)
        here, there = (s.step(logits.to(d)) for s, d in zip(searches, ("cpu", cuda), strict=True))
        np.testing.assert_allclose(there.scores, here.scores, atol=1e-4)
        np.testing.assert_array_equal(there.tokens, here.tokens)
        np.testing.assert_array_equal(there.parents, here.parents)
    found = searches[1].results()
    np.testing.assert_array_equal(items[found.items], found.tokens)
