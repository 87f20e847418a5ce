"""Warploom and torch's attention behind one interface: inputs in, one call for each copy out.

What cannot run, or refuses a case, raises `NotAvailable` with its own words.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from batches import Inputs
from harness import Implementation, NotAvailable, Thunk
from torch.nn.attention import SDPBackend, sdpa_kernel

import warploom as wl

VariantOf = Callable[[torch.device], wl.Variant]


def quietly(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call once so that a peer's refusal is its error and not a page of warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return run()
        except RuntimeError as refusal:
            reasons = [str(one.message).splitlines()[0] for one in said]
            raise NotAvailable("; ".join([*reasons[:2], str(refusal).splitlines()[0]])) from refusal


def package(module: str, name: str, device: torch.device) -> Any:
    """A library whose kernels are for GPUs.

    Raises:
        NotAvailable: the device is none, or why the library is not there.
    """
    if device.type != "cuda":
        raise NotAvailable(f"{name} has no CPU kernels")
    try:
        return import_module(module)
    except Exception as missing:  # a partial install fails in many ways; each is the reason
        raise NotAvailable(f"{type(missing).__name__}: {missing}") from missing


# --- warploom -----------------------------------------------------------------------------------


def planned(variant: wl.Variant | None, inputs: Inputs, **options: Any) -> wl.AttentionWrapper:
    """A wrapper with a plan for the batch."""
    shape = inputs.shape
    options = {"kv_dtype": shape.kv_dtype} | options
    attention = wl.AttentionWrapper(
        variant,
        kv_format=wl.Paged(shape.page_size) if shape.page_size else wl.Ragged(),
        num_q_heads=shape.q_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.dim,
        dtype=shape.dtype,
        device=inputs.q.device,
        **options,
    )
    pages = (inputs.indices, inputs.last_page_len) if shape.page_size else ()
    attention.plan(inputs.qo_indptr, inputs.kv_indptr, *pages)
    return attention


def run_warploom(
    variant: VariantOf, options: dict[str, Any], inputs: Sequence[Inputs]
) -> list[Thunk]:
    attention = planned(variant(inputs[0].q.device), inputs[0], **options)
    return [partial(attention.run, one.q, (one.k, one.v)) for one in inputs]


def causal_variant(device: torch.device) -> wl.Variant:
    return wl.Causal()


def warploom(
    variant: VariantOf = causal_variant, name: str = "warploom", **options: Any
) -> Implementation:
    """Warploom with a variant, which may need tensors on the device."""
    return Implementation(name, partial(run_warploom, variant, options))


# --- torch --------------------------------------------------------------------------------------


def run_sdpa(backend: SDPBackend, is_causal: bool, inputs: Sequence[Inputs]) -> list[Thunk]:
    """torch's scaled_dot_product_attention, held to one backend."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            grouped, rows = q.shape[1] != k.shape[1], q.shape[2]
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal and rows > 1, enable_gqa=grouped
            )

    calls: list[Thunk] = [partial(call, *one.dense()) for one in inputs]
    quietly(calls[0])
    return calls


def cudnn(is_causal: bool = True) -> Implementation:
    return Implementation("cuDNN", partial(run_sdpa, SDPBackend.CUDNN_ATTENTION, is_causal))


def causal_mod(batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


ModsOf = Callable[[torch.device], tuple[Callable[..., Any] | None, Callable[..., Any] | None]]


def run_flex(mods: ModsOf, by_head: bool, inputs: Sequence[Inputs]) -> list[Thunk]:
    """FlexAttention on dense tensors; it has no page table of its own."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    dense = [one.dense() for one in inputs]
    q, k, _ = dense[0]
    score_mod, mask_mod = mods(q.device)
    mask = None
    if mask_mod is not None:
        sizes = None, q.shape[1] if by_head else None, q.shape[2], k.shape[2]
        mask = create_block_mask(mask_mod, *sizes, device=str(q.device))
    compiled: Any = partial(
        torch.compile(flex_attention, dynamic=False),
        score_mod=score_mod,
        block_mask=mask,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return [partial(compiled, *one) for one in dense]


def causal_mods(device: torch.device) -> tuple[None, Callable[..., Any]]:
    return None, causal_mod


def flex(mods: ModsOf = causal_mods, by_head: bool = False) -> Implementation:
    """FlexAttention; `by_head` if the mask differs between heads."""
    return Implementation("FlexAttention", partial(run_flex, mods, by_head))
