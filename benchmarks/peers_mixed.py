"""Peers on mixed batches: two kernels in turn, or one that knows both kinds of work.

FlashInfer, upstream FlashAttention-3 and cuDNN's own front end (`peers_upstream.py`). A half takes
the requests of one kind and makes one call for each copy, as prepared implementations do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import peers_flashinfer as flashinfer
import torch
from batches import Inputs
from harness import Implementation, NotAvailable, Thunk
from mixed_batches import Kind, Mixed
from peers_upstream import run_cudnn_chunk, run_fa3_paged

Halves = Callable[[Sequence[Inputs]], Sequence[Thunk]]


def in_turn(prefill: Halves, decode: Halves, batches: Sequence[Mixed]) -> list[Thunk]:
    """One half after the other, on one stream."""

    def both(first: Thunk, second: Thunk) -> tuple[torch.Tensor, torch.Tensor]:
        return first(), second()

    halves = prefill([one.prefill for one in batches]), decode([one.decode for one in batches])
    return [partial(both, *pair) for pair in zip(*halves, strict=True)]


def on_whole(run: Halves, batches: Sequence[Mixed]) -> Sequence[Thunk]:
    return run([one.whole for one in batches])


# --- FlashInfer -----------------------------------------------------------------------------------


def plan_options(kind: Kind) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if kind.soft_cap is not None:
        options["logits_soft_cap"] = kind.soft_cap
    if kind.window is not None:
        options["window_left"] = kind.window - 1  # without the query's own
    return options


def flashinfer_prefill(kind: Kind, backend: str) -> Halves:
    return partial(flashinfer.run_paged, backend, **plan_options(kind))


def flashinfer_decode(kind: Kind, tensor_cores: bool = True) -> Halves:
    return partial(flashinfer.run_decode, tensor_cores, **plan_options(kind))


def run_persistent(kind: Kind, batches: Sequence[Mixed]) -> Sequence[Thunk]:
    if kind.window is not None:
        raise NotAvailable("BatchAttention takes no window")
    soft_cap = 0.0 if kind.soft_cap is None else kind.soft_cap
    return on_whole(partial(flashinfer.run_persistent, logits_soft_cap=soft_cap), batches)


def pod_options(kind: Kind) -> dict[str, int]:
    """Of both kernels after POD-Attention; they differ in what they take at a run."""
    if kind.soft_cap is not None:
        raise NotAvailable("FlashInfer's POD kernels take no soft-cap")
    return {} if kind.window is None else {"window_left": kind.window - 1}


def run_pod(kind: Kind, batches: Sequence[Mixed]) -> list[Thunk]:
    """`PODWithPagedKVCacheWrapper`; its prefill reads keys that are not in pages: copied before."""
    first, device = batches[0].decode, batches[0].whole.q.device
    shape = first.shape
    package, options = flashinfer.library(device), pod_options(kind)
    wrapper = package.PODWithPagedKVCacheWrapper(flashinfer.workspace(device), "NHD")
    wrapper.plan(
        *flashinfer.on_device(first, first.kv_indptr, first.indices, first.last_page_len),
        shape.q_heads, shape.kv_heads, shape.dim, shape.page_size,
        q_data_type=shape.dtype, kv_data_type=shape.dtype, **options,
    )  # fmt: skip
    of_run = {f"{name}_p": value for name, value in options.items()}

    def call(one: Mixed, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decode = one.decode
        kv = decode.k, decode.v
        prefill_out, decode_out = wrapper.run(
            one.prefill.q, k, v, decode.q, kv, causal_p=True, **of_run
        )
        return prefill_out, decode_out

    def stored(one: Inputs) -> tuple[torch.Tensor, ...]:
        return tuple(one.stored(cache, 0).contiguous() for cache in (one.k, one.v))

    return [partial(call, one, *stored(one.prefill)) for one in batches]


def run_batch_pod(kind: Kind, batches: Sequence[Mixed]) -> list[Thunk]:
    """`BatchPODWithPagedKVCacheWrapper`."""
    first, device = batches[0], batches[0].whole.q.device
    shape = first.whole.shape
    package, options = flashinfer.library(device), pod_options(kind)
    wrapper = package.BatchPODWithPagedKVCacheWrapper(flashinfer.workspace(device), "NHD")
    lists = [
        array
        for part in (first.prefill, first.decode)
        for array in flashinfer.on_device(
            part, part.qo_indptr, part.kv_indptr, part.indices, part.last_page_len
        )
    ]
    wrapper.plan(
        *lists, shape.q_heads, shape.kv_heads, shape.dim, shape.page_size,
        q_data_type=shape.dtype, kv_data_type=shape.dtype, **options,
    )  # fmt: skip

    def call(one: Mixed) -> tuple[torch.Tensor, torch.Tensor]:
        kv = one.whole.k, one.whole.v
        prefill_out, decode_out = wrapper.run(one.prefill.q, kv, one.decode.q, kv, causal_p=True)
        return prefill_out, decode_out

    return [partial(call, one) for one in batches]


# --- contestants ----------------------------------------------------------------------------------


def serial_ways(kind: Kind, group_size: int) -> dict[str, list[Implementation]]:
    """Row -> the ways of it, of which the fastest counts."""
    decode = flashinfer_decode(kind)
    fa3 = partial(run_fa3_paged, kind.soft_cap, kind.window)
    cudnn_chunk = partial(run_cudnn_chunk, kind.soft_cap, kind.window)
    halves: dict[str, dict[str, tuple[Halves, Halves]]] = {
        "FlashInfer serial": {
            "fa3, tensor cores": (flashinfer_prefill(kind, "fa3"), decode),
            "fa2, tensor cores": (flashinfer_prefill(kind, "fa2"), decode),
        },
        "FlashAttention-3 serial": {
            "decode of FlashInfer": (fa3, decode),
            "decode of its own": (fa3, fa3),
        },
        "cuDNN serial": {"decode of FlashInfer": (cudnn_chunk, decode)},
    }
    if group_size == 1:  # one row fills no tensor core
        cores = flashinfer_decode(kind, tensor_cores=False)
        halves["FlashInfer serial"]["fa3, CUDA cores"] = flashinfer_prefill(kind, "fa3"), cores
    return {
        row: [Implementation(way, partial(in_turn, *pair)) for way, pair in ways.items()]
        for row, ways in halves.items()
    }


def fused_ways(kind: Kind) -> dict[str, list[Implementation]]:
    """Rows of one launch. A graph that holds a POD kernel replays nothing (FlashInfer 0.7.2)."""
    fused = {
        "FlashInfer POD": (run_pod, False),
        "FlashInfer BatchPOD": (run_batch_pod, False),
        "FlashInfer persistent": (run_persistent, True),
    }
    rows = {
        row: [Implementation(row, partial(run, kind), captured)]
        for row, (run, captured) in fused.items()
    }
    one_call = partial(on_whole, partial(run_fa3_paged, kind.soft_cap, kind.window))
    return {**rows, "FlashAttention-3": [Implementation("FlashAttention-3", one_call)]}
