"""Upstream FlashAttention-3 (`flash_attn_interface`) and cuDNN's own front end, where installed.

results/README.md says how to get each. As everywhere, a window counts the query's own key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from batches import Inputs
from harness import Implementation, NotAvailable, Thunk
from peers import package

LEAST_CUDNN = (1, 32)  # of the front end


# --- FlashAttention-3 -----------------------------------------------------------------------------


def padded_pages(inputs: Inputs) -> torch.Tensor:
    """int32 [requests, most pages] on the device; what is behind a request's pages is 0."""
    lists = inputs.indices.tensor_split(inputs.kv_indptr[1:-1].tolist())
    padded = torch.nn.utils.rnn.pad_sequence(list(lists), batch_first=True)
    return padded.to(inputs.q.device)


def lengths_of(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(lens, dtype=torch.int32, device=device)


def run_fa3_paged(
    soft_cap: float | None, window: int | None, inputs: Sequence[Inputs]
) -> list[Thunk]:
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
    if soft_cap is not None:
        options["softcap"] = soft_cap
    if window is not None:
        options["window_size"] = (window - 1, 0)
    table = options["page_table"]
    options["scheduler_metadata"] = flash.get_scheduler_metadata(
        len(table), options["max_seqlen_q"], table.shape[1] * shape.page_size, shape.q_heads,
        shape.kv_heads, shape.dim, options["cache_seqlens"], qkv_dtype=shape.dtype,
        cu_seqlens_q=options["cu_seqlens_q"], page_size=shape.page_size, causal=True,
        window_size=options.get("window_size", (-1, -1)), has_softcap=soft_cap is not None,
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


def cudnn_graph(cudnn: Any, dtype: torch.dtype, handle: Any) -> Any:
    stored = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}
    return cudnn.pygraph(
        io_data_type=stored[dtype], intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT, handle=handle, is_cuda_graph_replay_expected=True,
    )  # fmt: skip


def built(cudnn: Any, graph: Any, out: Any, q: torch.Tensor) -> torch.Tensor:
    """Builds the graph, whose result lies as q does; returns what it works in."""
    out.set_output(True).set_dim(list(q.shape)).set_stride(list(q.stride()))
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    size = max(1, graph.get_workspace_size())
    return torch.empty(size, dtype=torch.uint8, device=q.device)


def run_cudnn_chunk(
    soft_cap: float | None, window: int | None, inputs: Sequence[Inputs]
) -> list[Thunk]:
    """Its attention over pages, of one request."""
    first, device = inputs[0], inputs[0].q.device
    cudnn, shape = cudnn_library(device), inputs[0].shape
    if shape.batch != 1 or soft_cap is not None:
        raise NotAvailable("written down for one request without soft-cap")
    handle = cudnn_handle(device)
    graph = cudnn_graph(cudnn, shape.dtype, handle)
    pages = padded_pages(first)[:, None, :, None]
    q_lens, kv_lens = (
        lengths_of(lens, device)[:, None, None, None] for lens in (shape.q_lens, shape.kv_lens)
    )
    given = (heads_first(first.q[None]), heads_first(first.k), heads_first(first.v))
    names = [graph.tensor_like(x) for x in (*given, pages, pages, q_lens, kv_lens)]
    q, k, v, k_pages, v_pages, q_len, kv_len = names
    band = {} if window is None else {"diagonal_band_left_bound": window}
    out, _ = graph.sdpa(
        q=q, k=k, v=v, attn_scale=shape.dim**-0.5, generate_stats=False,
        use_padding_mask=True, seq_len_q=q_len, seq_len_kv=kv_len,
        paged_attention_k_table=k_pages, paged_attention_v_table=v_pages,
        paged_attention_max_seq_len_kv=shape.kv_lens[0],
        diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT, diagonal_band_right_bound=0,
        **band,
    )  # fmt: skip
    scratch = built(cudnn, graph, out, given[0])

    def call(one: Inputs) -> torch.Tensor:
        result = torch.empty_like(one.q)
        tensors = (heads_first(one.q[None]), heads_first(one.k), heads_first(one.v), pages, pages,
                   q_lens, kv_lens, heads_first(result[None]))  # fmt: skip
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute(dict(zip((*names, out), tensors, strict=True)), scratch, handle=handle)
        return result

    return [partial(call, one) for one in inputs]


def run_cudnn_dense(is_causal: bool, inputs: Sequence[Inputs]) -> list[Thunk]:
    """Its attention over requests of equal lengths."""
    first, device = inputs[0], inputs[0].q.device
    cudnn, shape = cudnn_library(device), inputs[0].shape
    if len(set(shape.q_lens) | set(shape.kv_lens)) > 1 or shape.page_size:
        raise NotAvailable("written down for dense requests of one length")
    handle, given = cudnn_handle(device), first.dense()
    graph = cudnn_graph(cudnn, shape.dtype, handle)
    names = [graph.tensor_like(x) for x in given]
    q, k, v = names
    band = {"diagonal_band_right_bound": 0} if is_causal else {}
    out, _ = graph.sdpa(
        q=q, k=k, v=v, attn_scale=shape.dim**-0.5, generate_stats=False,
        diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT, **band,
    )  # fmt: skip
    scratch = built(cudnn, graph, out, given[0])

    def call(*dense: torch.Tensor) -> torch.Tensor:
        result = torch.empty_strided(
            dense[0].shape, given[0].stride(), dtype=shape.dtype, device=device
        )
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute(
            dict(zip((*names, out), (*dense, result), strict=True)), scratch, handle=handle
        )
        return result

    return [partial(call, *one.dense()) for one in inputs]


def run_fa3_ragged(is_causal: bool, inputs: Sequence[Inputs]) -> list[Thunk]:
    """FlashAttention-3 over requests of any lengths, keys not in pages.

    This call takes no `scheduler_metadata`: its scheduler counts within what is timed.
    """
    first, device = inputs[0], inputs[0].q.device
    flash, shape = package("flash_attn_interface", "FlashAttention-3", device), first.shape
    if shape.page_size:
        raise NotAvailable("keys lie in pages; see run_fa3_paged")
    ends = first.qo_indptr.to(device), first.kv_indptr.to(device)
    longest = max(shape.q_lens), max(shape.kv_lens)
    attend = flash.flash_attn_varlen_func
    return [
        partial(attend, one.q, one.k, one.v, *ends, *longest, causal=is_causal) for one in inputs
    ]


# --- contestants of prefill -----------------------------------------------------------------------


def flash3(is_causal: bool = True) -> Implementation:
    return Implementation("FlashAttention-3", partial(run_fa3_ragged, is_causal))


def flash3_paged() -> Implementation:
    """For causal attention over pages."""
    return Implementation("FlashAttention-3", partial(run_fa3_paged, None, None))


def cudnn_frontend(is_causal: bool = True) -> Implementation:
    """cuDNN's front end, whose kernels for Hopper torch may not choose."""
    return Implementation("cuDNN front end", partial(run_cudnn_dense, is_causal))
