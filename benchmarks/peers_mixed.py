"""Peers on mixed batches: two kernels in turn, or one that knows both kinds of work.

FlashInfer, upstream FlashAttention-3 (`flash_attn_interface`) and cuDNN's own front end, where they
are installed; results/README.md says how to get each. A half takes the requests of one kind and
makes one call for each copy, as prepared implementations do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import peers_flashinfer as flashinfer
import torch
from batches import Inputs
from harness import Implementation, NotAvailable, Thunk
from mixed_batches import Kind, Mixed
from peers import package

Halves = Callable[[Sequence[Inputs]], Sequence[Thunk]]
LEAST_CUDNN = (1, 32)  # of the front end


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


# --- FlashAttention-3 -----------------------------------------------------------------------------


def padded_pages(inputs: Inputs) -> torch.Tensor:
    """int32 [requests, most pages] on the device; what is behind a request's pages is 0."""
    lists = inputs.indices.tensor_split(inputs.kv_indptr[1:-1].tolist())
    padded = torch.nn.utils.rnn.pad_sequence(list(lists), batch_first=True)
    return padded.to(inputs.q.device)


def lengths_of(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(lens, dtype=torch.int32, device=device)


def run_fa3(kind: Kind, inputs: Sequence[Inputs]) -> list[Thunk]:
    """Its kernel for caches in pages, for requests of any lengths.

    What its scheduler counts before a call is counted before the timing, as others plan.
    """
    first, device = inputs[0], inputs[0].q.device
    flash, shape = package("flash_attn_interface", "FlashAttention-3", device), first.shape
    options: dict[str, Any] = {
        "page_table": padded_pages(first),
        "cache_seqlens": lengths_of(first.shape.kv_lens, device),
        "cu_seqlens_q": first.qo_indptr.to(device),
        "max_seqlen_q": max(first.shape.q_lens),
        "causal": True,
    }
    if kind.soft_cap is not None:
        options["softcap"] = kind.soft_cap
    if kind.window is not None:
        options["window_size"] = (kind.window - 1, 0)
    table = options["page_table"]
    options["scheduler_metadata"] = flash.get_scheduler_metadata(
        len(table), options["max_seqlen_q"], table.shape[1] * shape.page_size, shape.q_heads,
        shape.kv_heads, shape.dim, options["cache_seqlens"], qkv_dtype=shape.dtype,
        cu_seqlens_q=options["cu_seqlens_q"], page_size=shape.page_size, causal=True,
        window_size=options.get("window_size", (-1, -1)), has_softcap=kind.soft_cap is not None,
    )  # fmt: skip
    attend = flash.flash_attn_with_kvcache
    return [partial(attend, one.q, one.k, one.v, **options) for one in inputs]


# --- cuDNN ----------------------------------------------------------------------------------------


def cudnn_library(device: torch.device) -> Any:
    cudnn = package("cudnn", "cuDNN", device)
    version = tuple(int(part) for part in cudnn.__version__.split(".")[:2])
    if version < LEAST_CUDNN:
        wanted = ".".join(map(str, LEAST_CUDNN))
        raise NotAvailable(f"nvidia-cudnn-frontend {cudnn.__version__}; expected {wanted} or later")
    return cudnn


@lru_cache(maxsize=1)
def cudnn_handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return cudnn_library(device).create_handle()


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """[n, tokens, heads, dim] seen as cuDNN names the axes: [n, heads, tokens, dim]."""
    return x.transpose(1, 2)


def run_cudnn_chunk(kind: Kind, inputs: Sequence[Inputs]) -> list[Thunk]:
    """Its attention over pages, of one request."""
    first, device = inputs[0], inputs[0].q.device
    cudnn, shape = cudnn_library(device), inputs[0].shape
    if shape.batch != 1 or kind.soft_cap is not None:
        raise NotAvailable("written down for one request without soft-cap")
    handle = cudnn_handle(device)
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16, intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT, handle=handle, is_cuda_graph_replay_expected=True,
    )  # fmt: skip
    pages = padded_pages(first)[:, None, :, None]
    q_lens, kv_lens = (
        lengths_of(lens, device)[:, None, None, None] for lens in (shape.q_lens, shape.kv_lens)
    )
    given = (heads_first(first.q[None]), heads_first(first.k), heads_first(first.v))
    names = [graph.tensor_like(x) for x in (*given, pages, pages, q_lens, kv_lens)]
    q, k, v, k_pages, v_pages, q_len, kv_len = names
    band = {} if kind.window is None else {"diagonal_band_left_bound": kind.window}
    out, _ = graph.sdpa(
        q=q, k=k, v=v, attn_scale=shape.dim**-0.5, generate_stats=False,
        use_padding_mask=True, seq_len_q=q_len, seq_len_kv=kv_len,
        paged_attention_k_table=k_pages, paged_attention_v_table=v_pages,
        paged_attention_max_seq_len_kv=shape.kv_lens[0],
        diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT, diagonal_band_right_bound=0,
        **band,
    )  # fmt: skip
    out.set_output(True).set_dim(list(given[0].shape)).set_stride(list(given[0].stride()))
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    scratch = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)

    def call(one: Inputs) -> torch.Tensor:
        result = torch.empty_like(one.q)
        tensors = (heads_first(one.q[None]), heads_first(one.k), heads_first(one.v), pages, pages,
                   q_lens, kv_lens, heads_first(result[None]))  # fmt: skip
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute(dict(zip((*names, out), tensors, strict=True)), scratch, handle=handle)
        return result

    return [partial(call, one) for one in inputs]


# --- contestants ----------------------------------------------------------------------------------


def serial_ways(kind: Kind, group_size: int) -> dict[str, list[Implementation]]:
    """Row -> the ways of it, of which the fastest counts."""
    decode = flashinfer_decode(kind)
    halves: dict[str, dict[str, tuple[Halves, Halves]]] = {
        "FlashInfer serial": {
            "fa3, tensor cores": (flashinfer_prefill(kind, "fa3"), decode),
            "fa2, tensor cores": (flashinfer_prefill(kind, "fa2"), decode),
        },
        "FlashAttention-3 serial": {
            "decode of FlashInfer": (partial(run_fa3, kind), decode),
            "decode of its own": (partial(run_fa3, kind), partial(run_fa3, kind)),
        },
        "cuDNN serial": {"decode of FlashInfer": (partial(run_cudnn_chunk, kind), decode)},
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
    one_call = partial(on_whole, partial(run_fa3, kind))
    return {**rows, "FlashAttention-3": [Implementation("FlashAttention-3", one_call)]}
