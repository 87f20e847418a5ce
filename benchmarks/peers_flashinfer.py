"""FlashInfer as a peer, where it is installed: each of its kernels that can do a case.

Its wrappers compile what they need when they are first planned. A kernel that is not compiled yet
takes it 10 to 70 seconds, once: later runs load it from its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from batches import Inputs
from harness import Implementation, NotAvailable, Thunk
from peers import package

WORKSPACE_BYTES = 2 << 30  # its habitual 128 to 384 MiB are too few for 32 key/value heads

# A bias of each head that grows with distance, for its Hopper kernel: the ALiBi of its other kernel
# is a flag there.
HEAD_BIAS = r"""
struct HeadBias {
  float sm_scale_log2, slope;
  template <typename MainloopParams, typename BlockCoord>
  __device__ HeadBias(const MainloopParams& params, const BlockCoord& block_coord) {
    const auto& given = params.additional_params;
    sm_scale_log2 = given.sm_scale * math::log2e;
    slope = given.slopes[get<1>(block_coord)] / given.sm_scale;
  }
  template <int NUM_ROWS_PER_THREAD>
  __device__ auto GetAttentionUpdater() {
    return OnlineSoftmax<NUM_ROWS_PER_THREAD, /*WITH_SCALE=*/true>(sm_scale_log2);
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx,
                            { return logits + slope * (float(kv_idx) - float(qo_idx)); })
};
"""


def library(device: torch.device) -> Any:
    """The package, or `NotAvailable`."""
    return package("flashinfer", "FlashInfer", device)


@lru_cache(maxsize=1)
def workspace(device: torch.device) -> torch.Tensor:
    """Scratch memory of all wrappers: one runs at a time."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def on_device(inputs: Inputs, *arrays: torch.Tensor) -> list[torch.Tensor]:
    return [array.to(inputs.q.device) for array in arrays]


def run_ragged(backend: str, options: dict[str, Any], inputs: Sequence[Inputs]) -> list[Thunk]:
    first, shape = inputs[0], inputs[0].shape
    wrapper = library(first.q.device).BatchPrefillWithRaggedKVCacheWrapper(
        workspace(first.q.device), "NHD", backend=backend
    )
    wrapper.plan(
        *on_device(first, first.qo_indptr, first.kv_indptr), shape.q_heads, shape.kv_heads,
        shape.dim, q_data_type=shape.dtype, kv_data_type=shape.dtype, **{"causal": True, **options},
    )  # fmt: skip
    return [partial(wrapper.run, one.q, one.k, one.v) for one in inputs]


def run_head_bias(slopes: Any, inputs: Sequence[Inputs]) -> list[Thunk]:
    first, shape = inputs[0], inputs[0].shape
    dtypes = [shape.dtype] * 3
    wrapper = library(first.q.device).BatchPrefillWithRaggedKVCacheWrapper(
        workspace(first.q.device), "NHD", backend="fa3",
        jit_args=("bench_head_bias_f16", *dtypes, torch.int32, shape.dim, shape.dim, ["slopes"],
                  ["float"], ["sm_scale"], ["double"], "HeadBias", HEAD_BIAS),
    )  # fmt: skip
    wrapper.plan(
        *on_device(first, first.qo_indptr, first.kv_indptr), shape.q_heads, shape.kv_heads,
        shape.dim, q_data_type=shape.dtype, kv_data_type=shape.dtype, causal=True,
    )  # fmt: skip
    extra = slopes(shape.q_heads, first.q.device), shape.dim**-0.5
    return [partial(wrapper.run, one.q, one.k, one.v, *extra) for one in inputs]


def run_paged(backend: str, inputs: Sequence[Inputs], **options: Any) -> list[Thunk]:
    first, shape = inputs[0], inputs[0].shape
    wrapper = library(first.q.device).BatchPrefillWithPagedKVCacheWrapper(
        workspace(first.q.device), "NHD", backend=backend
    )
    wrapper.plan(
        *on_device(first, first.qo_indptr, first.kv_indptr, first.indices, first.last_page_len),
        shape.q_heads, shape.kv_heads, shape.dim, shape.page_size, causal=True,
        q_data_type=shape.dtype, kv_data_type=shape.dtype, **options,
    )  # fmt: skip
    return [partial(wrapper.run, one.q, (one.k, one.v)) for one in inputs]


def run_decode(tensor_cores: bool, inputs: Sequence[Inputs], **options: Any) -> list[Thunk]:
    first, shape = inputs[0], inputs[0].shape
    wrapper = library(first.q.device).BatchDecodeWithPagedKVCacheWrapper(
        workspace(first.q.device), "NHD", use_tensor_cores=tensor_cores
    )
    wrapper.plan(
        *on_device(first, first.kv_indptr, first.indices, first.last_page_len),
        shape.q_heads, shape.kv_heads, shape.dim, shape.page_size,
        q_data_type=shape.dtype, kv_data_type=first.k.dtype, **options,
    )  # fmt: skip
    return [partial(wrapper.run, one.q, (one.k, one.v)) for one in inputs]


def run_persistent(inputs: Sequence[Inputs], logits_soft_cap: float = 0.0) -> list[Thunk]:
    """`BatchAttention`, its persistent kernel."""
    first, shape = inputs[0], inputs[0].shape
    wrapper = library(first.q.device).BatchAttention("NHD", str(first.q.device))
    wrapper.float_workspace_buffer = workspace(first.q.device)  # its own is too small, see above
    lens = torch.tensor(shape.kv_lens, dtype=torch.int32)
    wrapper.plan(
        *on_device(first, first.qo_indptr, first.kv_indptr, first.indices, lens),
        shape.q_heads, shape.kv_heads, shape.dim, shape.dim, shape.page_size, causal=True,
        q_data_type=shape.dtype, kv_data_type=shape.dtype, logits_soft_cap=logits_soft_cap,
    )  # fmt: skip

    def call(one: Inputs) -> torch.Tensor:
        kv = one.k, one.v
        out: torch.Tensor = wrapper.run(one.q, kv, logits_soft_cap=logits_soft_cap)[0]
        return out

    return [partial(call, one) for one in inputs]


class NewTokens(Protocol):
    """Keys and values to be copied into a paged cache; see `append.Batch`."""

    k: torch.Tensor
    v: torch.Tensor
    cache: torch.Tensor
    tables: tuple[torch.Tensor, ...]

    @property
    def unchanged(self) -> bool: ...

    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def append(batches: Sequence[NewTokens]) -> Callable[[NewTokens], object]:
    """Its copy; requests and positions of rows are computed before, as once for all layers."""
    first = batches[0]
    run = library(first.k.device).append_paged_kv_cache
    if not first.unchanged:
        raise NotAvailable("copies keys and values as they are")
    request, position, _ = (x.to(torch.int32) for x in first.places())
    _, kv_indptr, kv_indices, last_page_len = first.tables

    def call(one: NewTokens) -> None:
        run(one.k, one.v, request, position, tuple(one.cache), kv_indices, kv_indptr, last_page_len)

    return call


class SharedPrefix(Protocol):
    """One query row a request over a prefix that all share and a suffix of its own.

    Attributes:
        q: [batch, q heads, dim].
        cache: [pages, 2, page size, kv heads, dim].
        table: kv_indptr, kv_indices and last_page_len, int32 on the host.
        prefix: tokens, a whole number of pages that every request lists first.
    """

    q: torch.Tensor
    cache: torch.Tensor
    table: dict[str, Any]
    prefix: int


def run_two_levels(inputs: Sequence[SharedPrefix]) -> list[Thunk]:
    """Its FA2 kernel once for the prefix and once for the suffixes, and its merge of both."""
    first = inputs[0]
    device, (batch, q_heads, dim) = first.q.device, first.q.shape
    flashinfer, scratch = library(device), workspace(device)
    page_size, kv_heads = first.cache.shape[2:4]
    shared = first.prefix // page_size
    begins, last = (torch.as_tensor(first.table[key]) for key in ("kv_indptr", "last_page_len"))
    pages = torch.as_tensor(first.table["kv_indices"])
    lists = pages.tensor_split(begins[1:-1].tolist())
    own = torch.cat([pages_of[shared:] for pages_of in lists])
    own_begins = begins - shared * torch.arange(batch + 1)
    sizes = q_heads, kv_heads, dim, page_size
    types = {"q_data_type": first.q.dtype, "kv_data_type": first.q.dtype}

    def ints(values: Any) -> torch.Tensor:
        return torch.as_tensor(values).to(device, torch.int32)

    prefix = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", backend="fa2")
    prefix.plan(
        ints([0, batch]), ints([0, shared]), ints(lists[0][:shared]), ints([page_size]),
        *sizes, causal=False, **types,
    )  # fmt: skip
    suffix = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", use_tensor_cores=True)
    suffix.plan(ints(own_begins), ints(own), ints(last), *sizes, **types)

    def call(one: SharedPrefix) -> torch.Tensor:
        kv = one.cache[:, 0], one.cache[:, 1]
        states = [level.run(one.q, kv, return_lse=True) for level in (prefix, suffix)]
        out: torch.Tensor = flashinfer.merge_state(*states[0], *states[1])[0]
        return out

    return [partial(call, one) for one in inputs]


def ragged(backend: str, **options: Any) -> Implementation:
    return Implementation(f"FlashInfer {backend}", partial(run_ragged, backend, options))


def head_bias(slopes: Any) -> Implementation:
    """ALiBi as a variant of a user's own for its Hopper kernel."""
    return Implementation("FlashInfer fa3", partial(run_head_bias, slopes))


def paged(backend: str) -> Implementation:
    return Implementation(f"FlashInfer {backend}", partial(run_paged, backend))


TWO_LEVELS = Implementation("FlashInfer two levels", run_two_levels)
DECODE = (
    Implementation("FlashInfer", partial(run_decode, False)),
    Implementation("FlashInfer tensor cores", partial(run_decode, True)),
    Implementation("FlashInfer persistent", run_persistent),
)
