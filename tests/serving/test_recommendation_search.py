"""Searches over composed attention, beside searches that recompute every sequence from scratch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.recommendation import BeamPages, BeamSearch, ItemMask, ItemTable, Recommended

VOCAB, STEPS, LAYERS, HEADS, KV_HEADS, DIM = 24, 3, 2, 4, 2, 32
WIDTH, PREFIX = 32, 37
Path = tuple[int, ...]


class Model:
    """Two layers of attention without anything else; weights are random."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made) * 3 / math.sqrt(shape[0])

        self.embedding, self.head = weight(VOCAB, 64), weight(64, VOCAB)
        self.q = [weight(64, HEADS * DIM) for _ in range(LAYERS)]
        self.k, self.v = ([weight(64, KV_HEADS * DIM) for _ in range(LAYERS)] for _ in range(2))
        self.out = [weight(HEADS * DIM, 64) for _ in range(LAYERS)]

    def logits(
        self, tokens: torch.Tensor, attend: Callable[[int, Any, Any, Any], torch.Tensor]
    ) -> torch.Tensor:
        """[tokens, vocabulary]; `attend` takes the layer, queries, keys and values."""
        x = self.embedding[tokens]
        for layer in range(LAYERS):
            q = (x @ self.q[layer]).view(-1, HEADS, DIM)
            k, v = ((x @ w[layer]).view(-1, KV_HEADS, DIM) for w in (self.k, self.v))
            x = x + attend(layer, q, k, v).reshape(-1, HEADS * DIM) @ self.out[layer]
            x = x / x.norm(dim=-1, keepdim=True) * 8
        return x @ self.head


def dense(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one whole sequence."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def from_scratch(
    model: Model, prefix: list[int], items: list[Path], width: int
) -> list[tuple[float, Path]]:
    """Beam search in plain Python: no cache, no mask; each candidate's sequence is recomputed."""
    beams: list[tuple[float, Path]] = [(0.0, ())]
    for level in range(STEPS):
        candidates = []
        for score, path in beams:
            last = model.logits(torch.tensor([*prefix, *path]), dense)[-1].double()
            valid = sorted({item[level] for item in items if item[:level] == path})
            total = math.log(sum(math.exp(float(last[t])) for t in valid))
            candidates += [(score + float(last[t]) - total, (*path, t)) for t in valid]
        beams = sorted(candidates, reverse=True)[:width]
    return beams


def searched(
    model: Model, prefix: list[int], table: ItemTable, kv_format: wl.Paged, page: int, width: int
) -> tuple[Recommended, int]:
    """What the parts find together, and how many pages were copied."""
    prefix_pages = -(-len(prefix) // page)
    own = BeamPages.pages_needed(width, STEPS, len(prefix), page)
    order = np.random.default_rng(0).permutation(prefix_pages + own)
    pages = BeamPages(
        order[:prefix_pages], len(prefix), order[prefix_pages:], page_size=page, width=width
    )
    caches = torch.zeros(LAYERS, len(order), 2, page, KV_HEADS, DIM)
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=kv_format, num_q_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM, dtype="float32", device="cpu",
    )  # fmt: skip

    def forward(tokens: Any, rows: int) -> torch.Tensor:
        tables, indptr = pages.tables(), np.arange(len(pages) + 1) * rows
        attention.plan(indptr, **tables)

        def attend(layer: int, q: Any, k: Any, v: Any) -> torch.Tensor:
            wl.append(k, v, caches[layer], indptr, **tables)
            return attention.run(q, caches[layer])

        return model.logits(torch.as_tensor(tokens), attend)

    search = BeamSearch(ItemMask(table, width), width)
    logits, copied = forward(prefix, len(prefix))[-1:], 0
    for step in range(STEPS):
        chosen = search.step(logits)
        if step + 1 < STEPS:
            copies = pages.advance(chosen.parents)
            copies.apply(*caches)
            copied += len(copies.source)
            logits = forward(chosen.tokens, 1)
    return search.results(), copied


@pytest.mark.parametrize(
    ("kv_format", "page", "width"),
    [
        (wl.Composed(1), 1, WIDTH),
        (wl.Composed(4), 4, WIDTH),
        (wl.Composed(16), 16, WIDTH),
        (wl.Paged(4), 4, WIDTH),
        (wl.Composed(4), 4, 400),  # more beams than items: all of them are ranked
    ],
    ids=["tokens", "pages", "large pages", "single format", "all items"],
)
def test_a_search_finds_what_one_from_scratch_finds(
    kv_format: wl.Paged, page: int, width: int
) -> None:
    rng, model = np.random.default_rng(5), Model()
    items = [tuple(row) for row in np.unique(rng.integers(0, VOCAB, (120, STEPS)), axis=0).tolist()]
    prefix = rng.integers(0, VOCAB, PREFIX).tolist()
    expected = from_scratch(model, prefix, items, width)
    found, copied = searched(model, prefix, ItemTable(items, VOCAB), kv_format, page, width)
    assert found.scores == pytest.approx([score for score, _ in expected], abs=2e-4)
    assert [tuple(row) for row in found.tokens.tolist()] == [path for _, path in expected]
    assert [items[i] for i in found.items] == [path for _, path in expected]
    assert len(expected) == min(width, len(items))
    assert (copied == 0) == (page == 1)


def test_searches_may_share_a_mask() -> None:
    """Each step sees its own, whoever has prepared in between."""
    rng = torch.Generator().manual_seed(0)
    items = torch.randint(0, VOCAB, (200, STEPS), generator=rng).numpy()
    table = ItemTable(items, VOCAB)
    given = torch.randn(2, STEPS, 8, VOCAB, generator=rng)

    def chosen(masks: list[ItemMask]) -> list[Any]:
        searches, found = [BeamSearch(mask, 8) for mask in masks], []
        for level in range(STEPS):
            for search in searches:
                search.prepare()
            for which, search in enumerate(searches):
                step = search.step(given[which, level, : len(search)])
                found.append((which, step.parents.tolist(), step.tokens.tolist()))
        return found

    shared = ItemMask(table, 8)
    assert chosen([shared, shared]) == chosen([ItemMask(table, 8), ItemMask(table, 8)])
