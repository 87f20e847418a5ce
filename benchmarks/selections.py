"""Decode over selected pages (Quest): each sequence and head reads pages of its own; microseconds.

FlashInfer has no selection for each head: its page tables get one request for each sequence and
head, over the same memory, which a cache in layout HND allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import peers_flashinfer as flashinfer
import torch
from batches import label
from harness import Case, Check, Implementation, Thunk
from tables import Setting, Trial

import warploom as wl

PAGE, HEADS, DIM = 16, 32, 128
TOLERANCE = 1e-2  # relative, bf16 against float64


@dataclass(frozen=True)
class Selected:
    """One batch.

    Attributes:
        q: [batch, heads, dim].
        k, v: caches [pages, heads, page size, dim].
        pages: int32 [batch, heads, budget], what each head reads; the last page comes last.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pages: torch.Tensor


def make_selected(batch: int, length: int, budget: int, heads: int, device: Any) -> Selected:
    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

    own = length // PAGE  # pages of each sequence
    rng = np.random.default_rng(5)
    table = rng.permutation(batch * own).reshape(batch, 1, own)
    chosen = np.sort(rng.random((batch, heads, own - 1)).argsort(-1)[..., : budget - 1], -1)
    places = np.concatenate((chosen, np.full((batch, heads, 1), own - 1)), -1)
    pages = np.take_along_axis(np.broadcast_to(table, (batch, heads, own)), places, -1)
    cache = (batch * own, heads, PAGE, DIM)
    return Selected(
        random(batch, heads, DIM), random(*cache), random(*cache),
        torch.from_numpy(pages.astype(np.int32)).to(device),
    )  # fmt: skip


def check_selected(inputs: Selected) -> Check:
    """Compares the first and last head of the first and last sequence."""
    batch, heads, dim = inputs.q.shape
    pairs = sorted({(b, h) for b in (0, batch - 1) for h in (0, heads - 1)})

    def truth(pair: tuple[int, int]) -> torch.Tensor:
        pages = inputs.pages[pair].long()
        k, v = (x[pages, pair[1]].flatten(0, 1).double() for x in (inputs.k, inputs.v))
        return (k @ inputs.q[pair].double() * dim**-0.5).softmax(-1) @ v

    expected = torch.stack([truth(pair) for pair in pairs])

    def relative_error(output: torch.Tensor) -> float:
        got = torch.stack([output.view(batch, heads, dim)[pair].double() for pair in pairs])
        return float((got - expected).norm() / expected.norm())

    return Check(relative_error, TOLERANCE)


def run_warploom(inputs: Sequence[Selected]) -> list[Thunk]:
    first = inputs[0]
    batch, heads, budget = first.pages.shape
    attention = wl.PageSelectionWrapper(
        wl.Causal(), kv_format=wl.Paged(PAGE, layout="HND"), num_q_heads=heads,
        num_kv_heads=heads, head_dim=DIM, dtype=first.q.dtype, device=first.q.device,
    )  # fmt: skip
    requests = torch.arange(batch + 1)
    attention.plan(requests, requests * budget, first.pages, [PAGE] * batch)

    def call(one: Selected) -> torch.Tensor:
        attention.select(one.pages)  # as each layer has its own
        return attention.run(one.q, (one.k, one.v))

    return [partial(call, one) for one in inputs]


def folded(one: Selected) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Sequences times heads as requests of one head."""
    k, v = (x.flatten(0, 1)[:, None] for x in (one.k, one.v))
    return one.q.flatten(0, 1)[:, None], (k, v)


def run_flashinfer(tensor_cores: bool, inputs: Sequence[Selected]) -> list[Thunk]:
    first = inputs[0]
    batch, heads, budget = first.pages.shape
    device = first.q.device
    wrapper = flashinfer.library(device).BatchDecodeWithPagedKVCacheWrapper(
        flashinfer.workspace(device), "HND", use_tensor_cores=tensor_cores
    )
    requests = batch * heads
    indptr = torch.arange(requests + 1, dtype=torch.int32, device=device) * budget
    pages = first.pages * heads + torch.arange(heads, device=device, dtype=torch.int32)[:, None]
    last = torch.full((requests,), PAGE, dtype=torch.int32, device=device)
    wrapper.plan(
        indptr, pages.flatten(), last, 1, 1, DIM, PAGE, q_data_type=first.q.dtype,
        kv_data_type=first.q.dtype,
    )  # fmt: skip
    return [partial(wrapper.run, *folded(one)) for one in inputs]


CONTESTANTS = (
    Implementation("warploom", run_warploom),
    Implementation("FlashInfer", partial(run_flashinfer, False)),
    Implementation("FlashInfer tensor cores", partial(run_flashinfer, True)),
)


def selection_trials(setting: Setting) -> Iterator[Trial]:
    heads = HEADS if setting.on_gpu else 2
    for batch in setting.pick((1, 16), 2):
        for length in setting.pick((8192, 32768), 512):
            for budget in setting.pick((64, 128, 256, 512), 8):
                size = 2 * batch * heads * budget * PAGE * DIM * 2
                params = {"batch": batch, "length": length, "pages": budget, "heads": heads,
                          "page_size": PAGE, "head_dim": DIM, "dtype": "bfloat16"}  # fmt: skip
                case = Case(f"{batch} x {label(length)}, {budget} pages", 0.0, "us", size, params)
                make = partial(make_selected, batch, length, budget, heads)
                yield Trial(case, make, check_selected, CONTESTANTS)
