"""One request over dense keys and values, by `warploom.attention`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from warploom.engines.flashinfer.declared import Types
from warploom.engines.flashinfer.facade import RunScales
from warploom.engines.flashinfer.masks import Masks
from warploom.engines.flashinfer.refusals import checked_backend, checked_layout, refuse_given
from warploom.engines.flashinfer.variants import Shaping
from warploom.engines.flashinfer.words import in_words
from warploom.errors import WrongShape
from warploom.runtime.calls.attention import attention
from warploom.runtime.tensors.tensors import as_torch

# warploom's words -> those of these calls, which have no arguments for types and take k and v
_WORDS = {
    "dtype": "the type of q", "dtype torch": "q of type torch", "dtype=": "q of type ",
    "with dtype": "with q of type", "kv": "k and v",
}  # fmt: skip


@in_words(**_WORDS)
def single_prefill_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    o_dtype: Any = None,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Any:
    """Attention of the last rows of one request.

    Args:
        q: [rows, num_qo_heads, head_dim].
        k: [keys, num_kv_heads, head_dim], in layout HND [num_kv_heads, keys, head_dim]; in the type
            of q or in 8 bits.
        v: likewise, with head_dim_vo.
        scale_q, scale_k, scale_v, kv_cache_sf: refused.
        o_dtype: type of the output, which is converted from that of q.
        custom_mask: bools [rows, keys], True where a row sees a key, in place of `causal`.
        packed_custom_mask: its bits, uint8, little-endian, in place of custom_mask.
        causal: rows see no key after their own.
        kv_layout: "NHD" or "HND", of k and v.
        pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI".
        use_fp16_qk_reduction, backend: hints of speed, without effect; "cudnn" is refused.
        sm_scale: factor of q.k; 1/sqrt(head_dim) by default.
        window_left: keys before a row's own that it sees, beside a mask, too; -1 for all.
        logits_soft_cap: the bound of logits; None or 0 for none.
        rope_scale, rope_theta: of "ROPE_LLAMA"; 1 and 1e4 by default.
        return_lse: return the log-sum-exps, too, in base 2.
        k_scale, v_scale: numbers that q.k and the output are multiplied with; None is 1.

    Returns:
        The output [rows, num_qo_heads, head_dim_vo], or (output, log-sum-exps, float32 [rows,
        num_qo_heads]). Rows that see no key have 0 and -inf.

    Raises:
        What `warploom.attention` raises.
        ArgumentError: a mask of another size, an unknown layout or encoding, or a scale that is not
            above 0.
        UnsupportedByEngine: types without a kernel, or an argument that is refused.
    """
    del use_fp16_qk_reduction
    checked_backend(backend)
    refuse_given(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf)
    is_masked = custom_mask is not None or packed_custom_mask is not None
    shaping = Shaping(
        causal, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta, is_masked
    )
    q, k, v = _tensors(q, k, v, kv_layout, "[rows, heads, dim]")
    bits: dict[str, Any] = {}
    if is_masked:
        lens = np.array([q.shape[0]]), np.array([k.shape[0]])
        bits = Masks(q.device).inputs(custom_mask, packed_custom_mask, *lens)
    types = Types.of(q.dtype, k.dtype, o_dtype)
    scales = RunScales.of(None, k_scale, v_scale)
    return _attend(q, k, v, shaping, bits, scales, types, sm_scale, return_lse)


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


@in_words(**_WORDS)
def single_decode_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of the last row of one request.

    Args:
        q: [num_qo_heads, head_dim].
        k: [keys, num_kv_heads, head_dim], in layout HND [num_kv_heads, keys, head_dim]; in the type
            of q or in 8 bits.
        v: likewise.
        kv_layout: "NHD" or "HND", of k and v.
        pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI".
        use_tensor_cores: without effect.
        q_scale, k_scale, v_scale: numbers that q.k (the first two) and the output are multiplied
            with; None is 1.
        window_left: keys before the row's own that it sees; -1 for all.
        logits_soft_cap: the bound of logits; None or 0 for none.
        sm_scale: factor of q.k; 1/sqrt(head_dim) by default.
        rope_scale, rope_theta: of "ROPE_LLAMA"; 1 and 1e4 by default.
        return_lse: return the log-sum-exps, too, in base 2.

    Returns:
        The output [num_qo_heads, head_dim], or (output, log-sum-exps, float32 [num_qo_heads]).

    Raises:
        What `warploom.attention` raises.
        ArgumentError: an unknown layout or encoding, or a scale that is not above 0.
        UnsupportedByEngine: types without a kernel, or a scale of several numbers.
    """
    del use_tensor_cores
    shaping = Shaping(
        False, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta
    )
    given = as_torch(q, "q")
    if given.dim() != 2:
        raise WrongShape(name="q", got=tuple(given.shape), expected="[heads, dim]")
    row, k, v = _tensors(given[None], k, v, kv_layout, "[heads, dim]")
    scales = RunScales.of(q_scale, k_scale, v_scale)
    types = Types.of(row.dtype, k.dtype)
    found = _attend(row, k, v, shaping, {}, scales, types, sm_scale, return_lse)
    return tuple(x[0] for x in found) if return_lse else found[0]


single_decode_with_kv_cache_return_lse = partial(single_decode_with_kv_cache, return_lse=True)


def _tensors(
    q: Any, k: Any, v: Any, kv_layout: str, expected: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All in layout NHD."""
    found = [as_torch(x, name) for name, x in (("q", q), ("k", k), ("v", v))]
    for name, x in zip("qkv", found, strict=True):
        if x.dim() != 3:
            shape = expected if name == "q" else "three axes, of keys, heads and lanes"
            raise WrongShape(name=name, got=tuple(x.shape), expected=shape)
    lanes, before = found[0].shape[-1], tuple(found[1].shape[:2])
    if found[1].shape[-1] != lanes:
        raise WrongShape(name="k", got=tuple(found[1].shape), expected=f"{lanes} lanes, as q has")
    if found[2].shape[:2] != before:
        expected = f"{before} before its lanes, as k has"
        raise WrongShape(name="v", got=tuple(found[2].shape), expected=expected)
    if checked_layout(kv_layout) == "HND":
        found[1:] = [x.transpose(0, 1) for x in found[1:]]
    return found[0], found[1], found[2]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shaping: Shaping, bits: dict[str, Any],
    scales: RunScales, types: Types, sm_scale: float | None, return_lse: bool,
) -> Any:  # fmt: skip
    scores = replace(shaping.scores, has_scales=scales.are_needed)
    inputs: dict[str, Any] = shaping.values | bits
    if scales.are_needed:
        inputs |= scales.inputs
    o, lse = attention(
        q[None], k[None], v[None], variant=scores.variant, sm_scale=sm_scale, return_lse=True,
        lse_base="2", **inputs,
    )  # fmt: skip
    out = o[0].to(types.out)
    return (out, lse[0]) if return_lse else out
