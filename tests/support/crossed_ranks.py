"""Ranks that are not at the same call of the same wrapper as the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import warploom as wl
from support.lost_ranks import DIM, HEADS, OPTIONS
from warploom import distributed as wld
from warploom.errors import NoGradient
from warploom.serving.distributed.layouts import Interleaved, ZigZag


def _decoder(seed: int, requests: int = 1) -> Any:
    """A run of a wrapper of its own."""
    wrapper = wld.DecodeWrapper(timeout=2.0, **OPTIONS)
    lens = range(0, 8 * requests + 1, 8)
    wrapper.plan(
        list(range(requests + 1)), list(lens), total_kv_lens=[8 * wrapper.world] * requests
    )
    rng = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(n * requests, HEADS, DIM, generator=rng) for n in (1, 8))
    return lambda: wrapper.run(q, (k, k))


def _told(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "a result"


def in_another_order() -> list[str]:
    """Two wrappers, which rank 0 runs in the other order than the rest."""
    first, second = _decoder(1), _decoder(50)
    calls = (first, second) if dist.get_rank() else (second, first)
    return [_told(call) for call in calls]


def after_a_failure() -> list[str]:
    """Rank 0 fails before it sends anything, and goes on with another wrapper."""
    first, second = _decoder(1), _decoder(50)
    if dist.get_rank():
        return [_told(first), _told(second)]
    return [_told(second)]


def with_another_batch() -> list[str]:
    return [_told(_decoder(1, requests=2 - dist.get_rank()))]


def with_gradients() -> tuple[bool, str]:
    """Whether a query that wants a gradient changes a decode, and what asking for it says."""
    rank = dist.get_rank()
    wrapper = wld.DecodeWrapper(**OPTIONS)
    wrapper.plan([0, 1], [0, 8], total_kv_lens=[8 * wrapper.world])
    q, k = torch.ones(1, HEADS, DIM), torch.randn(8, HEADS, DIM)
    expected = wrapper.run(q, (k, k), return_lse=True)
    found = wrapper.run(q.requires_grad_(), (k, k), return_lse=True)
    same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    try:
        found[rank % 2].sum().backward()
    except NoGradient:
        return same, "NoGradient"
    return same, "nothing"


def learning(kind: Any) -> list[tuple[bool, str]]:
    """Whether results may be written to, and what asking for a gradient says.

    One call for each of what may want a gradient: queries, values, a sink, which an output
    transform reads, and a bias, which is given to a run.
    """
    return [_learning(kind, wanting) for wanting in ("q", "v", "sink", "bias")]


def _learning(kind: Any, wanting: str) -> tuple[bool, str]:
    sink, bias = (torch.zeros(HEADS, requires_grad=wanting == name) for name in ("sink", "bias"))
    variant = _Biased() & wl.AttentionSink(sink)
    wrapper, rows = _planned(kind, variant)
    q, k, v = (torch.randn(n, HEADS, DIM) for n in (rows, 8, 8))
    for name, x in (("q", q), ("v", v)):
        x.requires_grad_(wanting == name)
    out, lse = wrapper.run(q, (k, v), return_lse=True, bias=bias)
    is_kept = torch.equal(out.detach() + 1.0, out.add_(1.0)) and lse.mul_(2.0) is lse
    try:
        (out.sum() + lse.sum()).backward()
    except Exception as error:
        return is_kept, type(error).__name__
    return is_kept, "nothing"


def _planned(kind: Any, variant: wl.Variant) -> tuple[Any, int]:
    """A wrapper of eight keys on each rank, and how many query rows it takes."""
    wrapper: Any
    if kind == "decode":
        wrapper = wld.DecodeWrapper(variant, **OPTIONS)
        wrapper.plan([0, 1], [0, 8], total_kv_lens=[8 * wrapper.world])
        return wrapper, 1
    wrapper = wld.PrefillWrapper(variant, method=kind, **OPTIONS)
    wrapper.plan([8 * wrapper.world])
    return wrapper, 8


def compiled(kind: Any) -> list[bool]:
    """Whether runs between two graphs of torch.compile return what they return elsewhere."""
    wrapper, rows = _planned(kind, wl.Causal())
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, HEADS, DIM, generator=rng) for n in (rows, 8, 8))

    def layer(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(q * 2, (k, v))
        return out * 2

    expected, fast = layer(q), torch.compile(layer, backend="aot_eager")
    return [torch.equal(fast(q), expected) for _ in range(2)]


class _Biased(wl.Variant):
    """Reads a tensor that each run is given."""

    bias = wl.Tensor("float32", ("q_head",))

    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return logits + self.bias[at.q_head]


def of_another_world() -> list[str]:
    found = []
    for layout in (lambda world: ZigZag(2 * world), lambda _: Interleaved(64), lambda _: 3):
        try:
            wrong: Any = layout
            wld.PrefillWrapper(layout=wrong, **OPTIONS)
            found.append("accepted")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
