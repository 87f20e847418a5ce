"""FlashInfer's module of this name: decodes, and a plan of them that reads nothing of a device."""

from __future__ import annotations

from typing import Any

import torch

from warploom.engines.flashinfer.page import get_seq_lens
from warploom.engines.flashinfer.paged_decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from warploom.engines.flashinfer.single import single_decode_with_kv_cache
from warploom.errors import ArgumentError

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "get_seq_lens",
    "single_decode_with_kv_cache",
]


def fast_decode_plan(
    self: Any,
    indptr: Any,
    indices: Any,
    last_page_len: Any,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Any = None,
    kv_data_type: Any = None,
    data_type: Any = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Any = None,
) -> None:
    """Plan as `BatchDecodeWithPagedKVCacheWrapper.plan` does, from an indptr on the host.

    Engines put it in the place of a wrapper's own: `wrapper.begin_forward =
    functools.partial(fast_decode_plan, wrapper)`. No plan need be before it.

    Args:
        self: the wrapper.
        indptr, last_page_len: of which the lengths alone are taken, for pages of one token, where
            global_override_indptr_cpu is given; last_page_len of larger pages is read.
        indices, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left,
            logits_soft_cap, sm_scale, rope_scale, rope_theta, fixed_split_size, disable_split_kv,
            q_len_per_req: as of `plan`.
        q_data_type, kv_data_type, data_type: as of `plan`; float16 if the first and the last are
            None. The output has the type that `plan` was given last.
        non_blocking: without effect.
        global_override_indptr_cpu: the contents of indptr on the host: the host plans then, and
            waits for no device if pages have one token.

    Raises:
        ArgumentError: `self` is no wrapper of decodes.
        What `plan` raises.
    """
    if not isinstance(self, BatchDecodeWithPagedKVCacheWrapper):
        reason = f"is {type(self).__name__}; expected a BatchDecodeWithPagedKVCacheWrapper"
        raise ArgumentError(name="self", reason=reason)
    if global_override_indptr_cpu is not None:
        indptr = global_override_indptr_cpu
        if page_size == 1:  # all pages are full
            last_page_len = torch.ones(len(last_page_len), dtype=torch.int32)
    if q_data_type is None and data_type is None:
        q_data_type = "float16"
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        pos_encoding_mode=pos_encoding_mode, window_left=window_left,
        logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type,
        o_data_type=self.o_data_type, data_type=data_type, sm_scale=sm_scale,
        rope_scale=rope_scale, rope_theta=rope_theta, non_blocking=non_blocking,
        fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )  # fmt: skip
