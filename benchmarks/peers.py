"""Warploom and its peers behind one interface: inputs in, one call for each copy of them out.

A peer that is not installed, or refuses a case, raises `NotAvailable` with its own words.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import Implementation, NotAvailable, Thunk
from torch.nn.attention import SDPBackend, sdpa_kernel

import warploom as wl


@dataclass(frozen=True)
class Prefill:
    """Causal self-attention of equal lengths: q, k, v are [batch, heads, length, dim] views."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def ragged(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same memory as [batch * length, heads, dim]."""
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (self.q, self.k, self.v))
        return q, k, v


@dataclass(frozen=True)
class Decode:
    """One query row a request over a paged cache, and the same keys and values as dense tensors.

    Attributes:
        q: [batch, q heads, dim].
        k_cache, v_cache: [pages, page size, kv heads, dim].
        indptr, indices, last_page_len: the page table, int32, on the CPU.
        k, v: [batch, kv heads, length, dim]; what the page table selects, for peers without pages.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def quietly(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call once so that a peer's refusal is its error and not a page of warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return run()
        except RuntimeError as refusal:
            reasons = [str(one.message).splitlines()[0] for one in said]
            raise NotAvailable("; ".join([*reasons[:2], str(refusal).splitlines()[0]])) from refusal


# --- warploom -----------------------------------------------------------------------------------


def warploom_prefill(inputs: Sequence[Prefill]) -> list[Thunk]:
    first = inputs[0].q
    batch, heads, length, dim = first.shape
    indptr = torch.arange(batch + 1, dtype=torch.int32) * length
    attention = wl.AttentionWrapper(
        wl.Causal(),
        kv_format=wl.Ragged(),
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        dtype=first.dtype,
        device=first.device,
    )
    attention.plan(indptr, indptr)

    def call(case: Prefill) -> torch.Tensor:
        q, k, v = case.ragged
        return attention.run(q, (k, v)).view(batch, length, heads, dim).transpose(1, 2)

    return [partial(call, case) for case in inputs]


def warploom_decode(inputs: Sequence[Decode]) -> list[Thunk]:
    first = inputs[0]
    batch, heads, dim = first.q.shape
    page_size, kv_heads = first.k_cache.shape[1:3]
    attention = wl.AttentionWrapper(
        wl.Causal(),
        kv_format=wl.Paged(page_size),
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=first.q.dtype,
        device=first.q.device,
    )
    qo_indptr = torch.arange(batch + 1, dtype=torch.int32)
    attention.plan(qo_indptr, first.indptr, first.indices, first.last_page_len)
    return [partial(attention.run, case.q, (case.k_cache, case.v_cache)) for case in inputs]


# --- torch --------------------------------------------------------------------------------------


def sdpa(backend: SDPBackend, inputs: Sequence[Any]) -> list[Thunk]:
    """torch's scaled_dot_product_attention, held to one backend."""

    def call(case: Prefill | Decode) -> torch.Tensor:
        with sdpa_kernel(backend):
            if isinstance(case, Prefill):
                return F.scaled_dot_product_attention(case.q, case.k, case.v, is_causal=True)
            q = case.q.unsqueeze(2)
            return F.scaled_dot_product_attention(q, case.k, case.v, enable_gqa=True).squeeze(2)

    quietly(partial(call, inputs[0]))
    return [partial(call, case) for case in inputs]


def _causal(batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def flex_prefill(inputs: Sequence[Prefill]) -> list[Thunk]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    length = inputs[0].q.shape[2]
    mask = create_block_mask(_causal, None, None, length, length, device=str(inputs[0].q.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    return [partial(compiled, case.q, case.k, case.v, block_mask=mask) for case in inputs]


def flex_decode(inputs: Sequence[Decode]) -> list[Thunk]:
    """FlexAttention has no page table of its own: it reads the dense copy of the cache."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(case: Decode) -> torch.Tensor:
        return compiled(case.q.unsqueeze(2), case.k, case.v, enable_gqa=True).squeeze(2)

    return [partial(call, case) for case in inputs]


# --- FlashInfer ---------------------------------------------------------------------------------


def _flashinfer(device: torch.device) -> Any:
    if device.type != "cuda":
        raise NotAvailable("FlashInfer has no CPU kernels")
    try:
        import flashinfer  # pyright: ignore[reportMissingImports]
    except Exception as missing:  # a partial install fails in many ways; each is the reason
        raise NotAvailable(f"{type(missing).__name__}: {missing}") from missing
    return flashinfer


def flashinfer_prefill(inputs: Sequence[Prefill]) -> list[Thunk]:
    first = inputs[0].q
    flashinfer = _flashinfer(first.device)
    batch, heads, length, dim = first.shape
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=first.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=first.device) * length
    wrapper.plan(
        indptr, indptr, heads, heads, dim, causal=True, q_data_type=first.dtype,
        kv_data_type=first.dtype,
    )  # fmt: skip

    def call(case: Prefill) -> torch.Tensor:
        return wrapper.run(*case.ragged).view(batch, length, heads, dim).transpose(1, 2)

    return [partial(call, case) for case in inputs]


def flashinfer_decode(inputs: Sequence[Decode]) -> list[Thunk]:
    first = inputs[0]
    flashinfer = _flashinfer(first.q.device)
    page_size, kv_heads = first.k_cache.shape[1:3]
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=first.q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        *(x.to(first.q.device) for x in (first.indptr, first.indices, first.last_page_len)),
        first.q.shape[1], kv_heads, first.q.shape[2], page_size, q_data_type=first.q.dtype,
        kv_data_type=first.q.dtype,
    )  # fmt: skip
    return [partial(wrapper.run, case.q, (case.k_cache, case.v_cache)) for case in inputs]


PREFILL = (
    Implementation("warploom", warploom_prefill),
    Implementation("sdpa cuDNN", partial(sdpa, SDPBackend.CUDNN_ATTENTION)),
    Implementation("sdpa flash", partial(sdpa, SDPBackend.FLASH_ATTENTION)),
    Implementation("FlexAttention", flex_prefill),
    Implementation("FlashInfer", flashinfer_prefill),
)

DECODE = (
    Implementation("warploom", warploom_decode),
    Implementation("sdpa cuDNN", partial(sdpa, SDPBackend.CUDNN_ATTENTION)),
    Implementation("sdpa flash", partial(sdpa, SDPBackend.FLASH_ATTENTION)),
    Implementation("FlexAttention", flex_decode),
    Implementation("FlashInfer", flashinfer_decode),
)
