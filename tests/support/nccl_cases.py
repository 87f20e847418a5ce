"""What ranks with a GPU each compute: prefills, and decodes that a CUDA graph replays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import warploom as wl
from warploom import distributed as wld
from warploom.runtime.formats.lists import as_indptr

Q_HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
OPTIONS: dict[str, Any] = {
    "num_q_heads": Q_HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16",
}  # fmt: skip
BOUNDS = wl.Bounds(max_requests=4, max_q_rows=4, max_kv_len=4096, max_blocks=256)


def _variant(sinks: torch.Tensor) -> wl.Variant:
    return wl.Causal() & wl.Rope() & wl.SlidingWindow(300) & wl.AttentionSink(sinks)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng).to(torch.bfloat16)


def _exact(lens: Any, q_lens: Any, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, float]:
    """The oracle's rows, and the error that a careless computation makes."""
    parts = [x.float().split(n) for x, n in ((q, q_lens), (k, lens), (v, lens))]
    exact = np.concatenate(wl.reference_batch(_variant(sinks), *parts)[0])
    naive = np.concatenate(wl.reference_batch(_variant(sinks), *parts, round_to="bfloat16")[0])
    return exact, 3 * float(np.abs(naive - exact).max()) + 4e-3


def prefill(method: Any) -> tuple[float, float]:
    """Largest error of this rank's rows, and what is allowed."""
    lens, sinks = [1000, 37, 515], torch.linspace(-1, 1, Q_HEADS)
    q, k, v = (_random(sum(lens), n, DIM, seed=n) for n in (Q_HEADS, KV_HEADS, KV_HEADS + 1))
    v = v[:, :KV_HEADS]
    wrapper = wld.PrefillWrapper(_variant(sinks.cuda()), method=method, device="cuda", **OPTIONS)
    rows = wrapper.layout.indices(lens, wrapper.rank)
    wrapper.plan(lens)
    out = wrapper.run(q[rows].cuda(), (k[rows].cuda(), v[rows].cuda()))
    exact, allowed = _exact(lens, lens, q, k, v, sinks)
    return float(np.abs(out.float().cpu().numpy() - exact[rows]).max()), allowed


def decode(heads: Any, on_device: bool) -> list[tuple[float, float]]:
    """Errors of batches that one captured graph replays; planned by the host, or in the graph."""
    sinks = torch.linspace(-1, 1, Q_HEADS)
    wrapper = wld.DecodeWrapper(
        _variant(sinks.cuda()), heads=heads, kv_format=wl.Paged(PAGE), bounds=BOUNDS,
        cuda_graph=True, device="cuda", **OPTIONS,
    )  # fmt: skip
    rank, world = wrapper.rank, wrapper.world
    lanes = slice(None)
    if heads == "own":
        lanes = slice(rank * Q_HEADS // world, (rank + 1) * Q_HEADS // world)
    cache = torch.zeros(2, 256, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    q = _random(4, Q_HEADS, DIM)[:, lanes].contiguous().cuda()
    held = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (5, 5, 256, 4, 4)]
    graph, out, errors = torch.cuda.CUDAGraph(), q, []

    def planned() -> None:
        *arrays, total = held if on_device else (x.cpu().numpy() for x in held)
        wrapper.plan(*arrays, total_kv_lens=total)

    for step, lens in enumerate(([700, 1, 64, 9], [3, 2000, 17, 1], [512, 512, 5, 1024])):
        k, v = (_random(sum(lens), KV_HEADS, DIM, seed=10 * step + i) for i in (1, 2))
        _fill(cache, held, wrapper.layout, rank, lens, (k, v))
        if step == 0:
            planned()
            wrapper.run(q, cache.unbind())  # connects the ranks
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                if on_device:
                    planned()
                out = wrapper.run(q, cache.unbind())
        elif not on_device:
            planned()
        graph.replay()
        exact, allowed = _exact(lens, [1] * 4, _random(4, Q_HEADS, DIM), k, v, sinks)
        found = out.float().cpu().numpy() - exact[:, lanes]
        errors.append((float(np.abs(found).max()), allowed))
    return errors


def _fill(cache: Any, held: Any, layout: Any, rank: int, lens: Any, kv: Any) -> None:
    """Write this rank's keys into pages, and the arrays of the plan."""
    own = layout.local_len(lens, rank)
    pages = -(-own // PAGE)
    begins = as_indptr(pages)
    for tokens, to in zip(kv, cache, strict=True):
        parts = tokens[layout.indices(lens, rank)].split(own.tolist())
        for begin, x in zip(begins, parts, strict=False):
            to[begin:].flatten(0, 1)[: len(x)] = x.cuda()
    last = np.where(own > 0, (own - 1) % PAGE + 1, 0)
    for array, values in zip(held, (range(5), begins, range(256), last, lens), strict=True):
        array.copy_(torch.as_tensor(np.array(values, np.int32)))
