"""What reads behind a collective: products of a layer, and a decoding step over pages of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from batches import page_table
from stand_in import StandIn

import warploom as wl
from warploom.prefetch import beside, beside_pages

PAGE, DIM = 16, 128
MARKS = {"plain": False, "kept": True}  # whether to be evicted last


@dataclass(frozen=True)
class Reader:
    """What reads behind the collective: one of the copies of its inputs.

    Attributes:
        name: of it.
        bytes: that it reads.
        read: reads them.
        fetch: is given a budget and CTAs; a block beside which it runs.
        least: budget.
    """

    name: str
    bytes: int
    read: Callable[[], torch.Tensor]
    fetch: Callable[[int, int], Any]
    least: int = 128


def weights(tiny: bool) -> Iterator[tuple[str, int, int]]:
    """Outputs and inputs of the products of a layer on one device."""
    if tiny:
        yield "tiny", 64, 128
        return
    yield "8B qkv", 6144, 4096
    yield "8B out", 4096, 4096
    yield "8B gate, up", 28672, 4096
    yield "8B down", 4096, 14336
    yield "70B/TP8 qkv", 1280, 8192
    yield "70B/TP8 out", 8192, 1024
    yield "70B/TP8 gate, up", 7168, 8192
    yield "70B/TP8 down", 8192, 3584


def by_marks(name: str, outputs: int, inputs: int, device: torch.device) -> dict[str, Reader]:
    """One product, whose weight is asked for with each of the marks."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
    x = torch.randn(1, inputs, device=device, dtype=dtype)
    read = partial(torch.nn.functional.linear, x, weight)

    def reader(keep: bool) -> Reader:
        def fetch(budget: int, sms: int) -> Any:
            return beside(weight, budget, sms=sms, keep=keep)

        return Reader(name, weight.nbytes, read, fetch)

    return {mark: reader(keep) for mark, keep in MARKS.items()}


def product(
    name: str, outputs: int, inputs: int, device: torch.device, mark: str = "plain"
) -> Reader:
    return by_marks(name, outputs, inputs, device)[mark]


def decoding(name: str, heads: int, kv_heads: int, device: torch.device, tiny: bool) -> Reader:
    requests, tokens = (2, 40) if tiny else (8, 4096)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(PAGE), num_q_heads=heads, num_kv_heads=kv_heads,
        head_dim=DIM, dtype=dtype, device=device,
    )  # fmt: skip
    indptr, indices, last = page_table((tokens,) * requests, PAGE)
    attention.plan(list(range(requests + 1)), indptr, indices, last)
    cache = torch.randn(len(indices), 2, PAGE, kv_heads, DIM, device=device, dtype=dtype)
    q = torch.randn(requests, heads, DIM, device=device, dtype=dtype)
    size = cache.numel() * cache.element_size()

    def fetch(budget: int, sms: int) -> Any:
        return beside_pages(attention, cache, budget, sms=sms)

    return Reader(name, size, partial(attention.run, q, cache), fetch, size // len(cache))


def readers(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], Reader]]]:
    for name, outputs, inputs in weights(tiny):
        yield name, partial(product, name, outputs, inputs, device)
    shapes = (("tiny keys", 2, 1),) if tiny else (("8B keys", 32, 8), ("70B/TP8 keys", 8, 1))
    for name, heads, kv_heads in shapes:
        yield name, partial(decoding, name, heads, kv_heads, device, tiny)


def keepers(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], Reader]]]:
    """The products again, whose weights are marked to be evicted last."""
    for name, outputs, inputs in weights(tiny):
        kept = f"{name}, kept"
        yield kept, partial(product, kept, outputs, inputs, device, "kept")


def step(stand_in: StandIn, reader: Reader, seconds: float, budget: int, sms: int) -> torch.Tensor:
    """The collective, the prefetch beside it, and the reads."""
    if budget:
        with reader.fetch(budget, sms):
            stand_in(seconds)
    else:
        stand_in(seconds)
    return reader.read()
