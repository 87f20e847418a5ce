"""Context parallelism over NCCL beside one GPU: decoding and causal prefill of long sequences.

    python benchmarks/context_parallel.py [--world 2] [--quick] [--out FOLDER]
    python benchmarks/context_parallel.py --tiny         # small, gloo, on the CPU

Heads of Llama 3.1 8B, bf16. Decodes are captured in a CUDA graph of several steps, prefills are
launched; a figure is the time of one layer's attention on the slowest rank, exchanges included.
Each rank computes the same alone, on all keys; what ranks find together must agree with that.
Beside each figure stands what `warploom.serving.distributed.scaling` predicts when attention has
the rate that it has here on one GPU, and links those that docs/distributed.md assumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from context_parallel_model import H200
from harness import Row
from ranks import Rank, arguments, on_ranks, quantiles

import warploom as wl
from warploom import distributed as wld
from warploom.serving.distributed import scaling
from warploom.serving.distributed.prefill import Method

NAME = "context_parallel"
PAGE, STEPS = 16, 8  # steps of a graph, each behind the other
TOLERANCE = 0.02  # of the largest value: two roundings of bf16, merged otherwise


@dataclass(frozen=True)
class Shape:
    """Heads of a layer, and how much is measured."""

    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    decodes: tuple[tuple[int, int], ...] = ((16, 8192), (16, 32768), (4, 131072))
    prompts: tuple[int, ...] = (8192, 32768, 131072)
    dtype: torch.dtype = torch.bfloat16
    replays: int = 20

    @property
    def options(self) -> dict[str, Any]:
        return {"num_q_heads": self.q_heads, "num_kv_heads": self.kv_heads, "head_dim": self.dim,
                "dtype": self.dtype}  # fmt: skip

    @property
    def heads(self) -> scaling.Heads:
        return scaling.Heads(self.q_heads, self.kv_heads, self.dim, self.dtype.itemsize)


QUICK = Shape(decodes=((16, 32768),), prompts=(32768,), replays=8)
TINY = Shape(4, 2, 32, ((2, 70),), (48,), torch.float32, 3)


def decoded(rank: Rank, shape: Shape, requests: int, tokens: int) -> Iterator[Row]:
    torch.manual_seed(0)  # all ranks make all keys, and each keeps its own
    made: dict[str, Any] = {"device": rank.device, "dtype": shape.dtype}
    lens = np.full(requests, tokens)
    keys = [torch.randn(requests * tokens, shape.kv_heads, shape.dim, **made) for _ in range(2)]
    q = torch.randn(requests, shape.q_heads, shape.dim, **made)
    alone = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(PAGE), device=rank.device, **shape.options
    )
    cache, table = in_pages(keys, lens)
    alone.plan(range(requests + 1), *table)
    expected, first = timed(rank, shape, partial(alone.run, q, cache.unbind()), STEPS)
    del cache
    case = f"decode {requests} x {tokens}"
    yield row(rank, case, "1 GPU", first, {})
    memory = shape.heads.key_bytes(requests * tokens) / median(first)
    for heads in ("all", "own"):
        wrapper = wld.DecodeWrapper(
            wl.Causal(), heads=heads, kv_format=wl.Paged(PAGE), device=rank.device,
            **shape.options,
        )  # fmt: skip
        kept = wrapper.layout.indices(lens, rank.rank)
        cache, table = in_pages([x[kept] for x in keys], wrapper.layout.local_len(lens, rank.rank))
        wrapper.plan(range(requests + 1), *table, total_kv_lens=lens)
        lanes = slice(None)
        if heads == "own":
            each = shape.q_heads // rank.world
            lanes = slice(rank.rank * each, (rank.rank + 1) * each)
        mine = q[:, lanes].contiguous()
        out, found = timed(rank, shape, partial(wrapper.run, mine, cache.unbind()), STEPS)
        machine = replace(H200, memory=memory)
        told = scaling.decode(shape.heads, machine, rows=requests, tokens=tokens,
                              world=rank.world, own_heads=heads == "own")  # fmt: skip
        name = f"{rank.world} GPUs, {heads} heads"
        yield row(rank, case, name, found, predicted(told), error(rank, out, expected[:, lanes]))


def prefilled(rank: Rank, shape: Shape, tokens: int) -> Iterator[Row]:
    torch.manual_seed(0)
    made: dict[str, Any] = {"device": rank.device, "dtype": shape.dtype}
    q = torch.randn(tokens, shape.q_heads, shape.dim, **made)
    keys = [torch.randn(tokens, shape.kv_heads, shape.dim, **made) for _ in range(2)]
    alone = wl.AttentionWrapper(wl.Causal(), device=rank.device, **shape.options)
    alone.plan([0, tokens], [0, tokens])
    expected, first = timed(rank, shape, partial(alone.run, q, tuple(keys)))
    case = f"prefill {tokens}"
    yield row(rank, case, "1 GPU", first, {})
    flops = 2 * tokens**2 * shape.q_heads * shape.dim / median(first)
    methods: dict[Method, Any] = {"ring": scaling.ring, "all_gather": scaling.all_gather}
    for method, model in methods.items():
        wrapper = wld.PrefillWrapper(
            wl.Causal(), method=method, device=rank.device, **shape.options
        )
        rows = wrapper.layout.indices([tokens], rank.rank)
        wrapper.plan([tokens])
        k, v = (x[rows] for x in keys)
        out, found = timed(rank, shape, partial(wrapper.run, q[rows], (k, v)))
        told = model(shape.heads, replace(H200, flops=flops), tokens=tokens, world=rank.world)
        name = f"{rank.world} GPUs, {method}"
        yield row(rank, case, name, found, predicted(told), error(rank, out, expected[rows]))


def in_pages(keys: list[torch.Tensor], lens: np.ndarray) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """[2, pages, page, heads, dim] with requests one behind the other, and the arrays of a plan."""
    pages = -(-lens // PAGE)
    ends = np.concatenate([[0], np.cumsum(pages)])
    first = keys[0]
    cache = first.new_zeros(2, int(ends[-1]), PAGE, *first.shape[1:])
    for tokens, to in zip(keys, cache, strict=True):
        for begin, part in zip(ends, tokens.split(lens.tolist()), strict=False):
            to[begin:].flatten(0, 1)[: len(part)] = part
    order = np.arange(ends[-1], dtype=np.int32)
    last = np.where(lens > 0, (lens - 1) % PAGE + 1, 0).astype(np.int32)
    return cache, (ends.astype(np.int32), order, last)


def timed(
    rank: Rank, shape: Shape, call: Callable[[], torch.Tensor], steps: int = 0
) -> tuple[torch.Tensor, list[float]]:
    """The result of what was timed, and seconds of a call.

    Args:
        steps: calls of a graph; 0 launches one.
    """
    for _ in range(2):  # what is compiled, allocated or connected at first stays out
        call()
    if not steps:
        times = rank.times(call, shape.replays)
        return call(), times
    replay, results = rank.captured(lambda: [call() for _ in range(steps)])
    times = [x / steps for x in rank.times(replay, shape.replays)]
    return results[-1].clone(), times  # the graph's memory ends with it


def predicted(told: scaling.Estimate) -> dict[str, float]:
    return {"predicted_us": round(1e6 * told.seconds, 2), "sent_mb": round(told.sent / 1e6, 3),
            "predicted_exchange_us": round(1e6 * told.exchange, 2)}  # fmt: skip


def error(rank: Rank, out: torch.Tensor, expected: torch.Tensor) -> float | None:
    """The largest of any rank, by the largest value; None if it is too large."""
    found = float((out.float() - expected.float()).abs().max() / expected.float().abs().max())
    (worst,) = rank.most([found])
    return worst if worst <= TOLERANCE else None


def row(
    rank: Rank, case: str, impl: str, times: list[float], params: dict[str, float],
    off: float | None = 0.0,
) -> Row:  # fmt: skip
    params = {"world": rank.world, **params}
    if off is None:
        note = "wrong: another result than that of one GPU"
        return Row(rank.table(NAME), case, impl, None, "us", note=note, params=params)
    mid, low, high = (1e3 * x for x in quantiles(times))
    return Row(rank.table(NAME), case, impl, round(1e3 * mid, 1), "us", mid, low, high, len(times),
               error=off, params=params)  # fmt: skip


def work(rank: Rank, shape: Shape, out: Path) -> None:
    parts = [decoded(rank, shape, *batch) for batch in shape.decodes]
    parts += [prefilled(rank, shape, tokens) for tokens in shape.prompts]
    rank.report(NAME, out, chain.from_iterable(parts))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options = arguments(parser, argv)
    shape = TINY if options.tiny else QUICK if options.quick else Shape()
    on_ranks(work, options.world, options.device, shape, options.out)


if __name__ == "__main__":
    main()
