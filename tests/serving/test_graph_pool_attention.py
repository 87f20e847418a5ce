"""Graph pools around attention: plans are rewritten, captures stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import ForbiddenUnderCapture
from warploom.graph_errors import CaptureFailed
from warploom.runtime.devices.graph import pool_capture

HEADS, KV_HEADS, DIM, PAGE, PAGES, MOST = 4, 2, 64, 16, 64, 8
SHAPE: dict[str, Any] = {
    "kv_format": wl.Paged(PAGE), "num_kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "float32",
    "device": "cpu",
}  # fmt: skip
BOUNDS = wl.Bounds(max_requests=MOST + 1, max_q_rows=MOST, max_kv_len=300, max_blocks=PAGES)
BATCHES = [(20,), (1, 2, 3), (290, 17, 1, 40, 5), (64,) * 8, (7, 99), (16, 15, 17), (33,)]


class Decoder:
    """A layer of decoding: projections, keys and values appended, attention, a projection."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        width = HEADS * DIM
        shapes = [(width, width), (width, KV_HEADS * DIM), (width, KV_HEADS * DIM), (width, width)]
        self.weights = [torch.randn(*s, generator=generator) * width**-0.5 for s in shapes]
        self.cache = torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM, generator=generator)
        self.attention = wl.AttentionWrapper(
            wl.Causal(), num_q_heads=HEADS, bounds=BOUNDS, cuda_graph=True, **SHAPE
        )

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (x @ w for w in self.weights[:3])
        rows = len(x)
        return q.view(rows, HEADS, DIM), k.view(rows, KV_HEADS, DIM), v.view(rows, KV_HEADS, DIM)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        page: torch.Tensor,
        at: torch.Tensor,
    ) -> torch.Tensor:
        self.cache[:, 0].index_put_((page, at), k)
        self.cache[:, 1].index_put_((page, at), v)
        return self.attention.run(q, self.cache)

    def out(self, attended: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attended.flatten(1) @ self.weights[3]
        return out

    def plan(self, lens: tuple[int, ...], tables: list[list[int]], padded: int) -> None:
        """Plan decoding; rows of padding are a request's that has no keys."""
        rows = len(lens)
        pages = [page for table in tables for page in table]
        ends: list[int] = np.cumsum([0, *map(len, tables)]).tolist()
        last = [(n - 1) % PAGE + 1 for n in lens]
        q_ends = [*range(rows + 1)]
        if padded > rows:
            q_ends, ends, last = [*q_ends, padded], [*ends, ends[-1]], [*last, 0]
        self.attention.plan(q_ends, ends, kv_indices=pages, last_page_len=last)

    def expected(self, x: torch.Tensor, lens: Any, tables: list[list[int]]) -> Any:
        """By torch, from a cache that holds the new tokens."""
        q, k, v = self.project(x)
        outs = []
        for row, (length, table) in enumerate(zip(lens, tables, strict=True)):
            keys, values = (
                torch.cat([self.cache[table, side].flatten(0, 1)[: length - 1], new[row][None]])
                for side, new in ((0, k), (1, v))
            )
            groups = HEADS // KV_HEADS
            outs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q[row][:, None],
                    keys.transpose(0, 1).repeat_interleave(groups, 0),
                    values.transpose(0, 1).repeat_interleave(groups, 0),
                ).flatten()
            )
        return torch.stack(outs) @ self.weights[3]


INPUTS = {
    "x": wl.GraphInput(torch.float32, (HEADS * DIM,)),
    "page": wl.GraphInput(torch.int64, pad=PAGES - 1),  # which no request has
    "at": wl.GraphInput(torch.int64),
}


@pytest.mark.parametrize("full_rows", [None, 0], ids=["full", "partial"])
def test_decoding_follows_each_plan(full_rows: int | None) -> None:
    layer = Decoder()
    step: list[Any] = [layer.project, wl.GraphPiece(layer.attend, "full"), layer.out]
    pool = wl.GraphPool(step, INPUTS, BOUNDS, device="cpu", full_rows=full_rows)
    generator = np.random.default_rng(1)
    for lens in [*BATCHES, *BATCHES[::-1]]:
        rows = len(lens)
        order = iter(generator.permutation(PAGES - 1).tolist())
        tables = [[next(order) for _ in range(-(-n // PAGE))] for n in lens]
        x = torch.from_numpy(generator.standard_normal((rows, HEADS * DIM), np.float32))
        layer.plan(lens, tables, pool.choose(rows).padded_rows)
        wanted = layer.expected(x, lens, tables)
        page = torch.tensor([table[-1] for table in tables])
        at = torch.tensor([(n - 1) % PAGE for n in lens])
        out = pool.run({"x": x, "page": page, "at": at})
        torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
    stats = pool.stats()
    assert stats.captures == 4  # of 1, 2, 4 and 8 rows
    assert stats.runs["full" if full_rows is None else "partial"] == 2 * len(BATCHES)


def test_warm_up_plans_by_prepare() -> None:
    layer = Decoder()
    step: list[Any] = [layer.project, wl.GraphPiece(layer.attend, "full"), layer.out]
    pool = wl.GraphPool(step, INPUTS, BOUNDS, device="cpu")
    assert pool.warm_up(lambda rows: layer.plan((), [], rows)) == len(pool.buckets) == 4
    lens, tables = (40, 3), [[5, 9, 2], [7]]
    layer.plan(lens, tables, pool.choose(2).padded_rows)
    x = torch.randn(2, HEADS * DIM)
    wanted = layer.expected(x, lens, tables)
    out = pool.run({"x": x, "page": torch.tensor([2, 7]), "at": torch.tensor([7, 2])})
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
    assert pool.stats().captures == 4


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_wrapper_whose_later_plans_no_replay_sees_is_refused(backend: str) -> None:
    cache = torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM)
    attention = wl.AttentionWrapper(wl.Causal(), num_q_heads=HEADS, backend=backend, **SHAPE)
    inputs = {"q": wl.GraphInput(torch.float32, (HEADS, DIM))}
    step = wl.GraphPiece(lambda q: attention.run(q, cache), "full")
    pool = wl.GraphPool(step, inputs, BOUNDS, device="cpu")
    q = torch.randn(2, HEADS, DIM)
    attention.plan([0, 1, 2], [0, 1, 2], kv_indices=[3, 5], last_page_len=[4, 9])
    with pytest.raises(CaptureFailed, match="cuda_graph=True and bounds"):
        pool.run({"q": q})
    falling = wl.GraphPool(step, inputs, BOUNDS, device="cpu", on_failure="eager")
    assert torch.equal(falling.run({"q": q}), attention.run(q, cache))


def test_a_capture_looks_at_wrappers_that_know_their_tensors() -> None:
    """On a device no mode of torch keeps such a run from the short way."""
    q, k, v = torch.randn(2, HEADS, DIM), *torch.randn(2, 9, KV_HEADS, DIM)
    shape = SHAPE | {"kv_format": wl.Ragged(), "num_q_heads": HEADS}
    loose = wl.AttentionWrapper(wl.Causal(), **shape)
    fixed = wl.AttentionWrapper(wl.Causal(), bounds=BOUNDS, cuda_graph=True, **shape)
    outs = []
    for attention in (loose, fixed):
        attention.plan([0, 2], [0, 9])
        outs += [attention.run(q, (k, v)) for _ in range(2)]
    with pool_capture(torch.device("cuda")):
        with pytest.raises(ForbiddenUnderCapture, match="cuda_graph=True"):
            loose.run(q, (k, v))
        with pytest.raises(ForbiddenUnderCapture, match="cuda_graph=True"):
            loose.run(q, (k, v), out=torch.empty_like(q))
        outs.append(fixed.run(q, (k, v)))
        wl.attention(q[None], k[None], v[None])  # which keeps a plan for each graph
    outs.append(loose.run(q, (k, v)))
    for out in outs:
        torch.testing.assert_close(out, outs[0])
