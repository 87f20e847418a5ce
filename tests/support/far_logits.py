"""Logits so large that float32 tells no small differences: ties are exact, all else is 0 or 1."""

from __future__ import annotations

from typing import Any

import torch

import warploom as wl

SCALES = (1e3, 1e6, 1e9, 1e12, 1e20, 1e30)


class Doubled(wl.Variant):
    """A transform, so that hooks see the scaled logits."""

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return 2.0 * logits


def integers(*shape: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """Small ones: products of such vectors are exact in float32, and many are the same."""
    return torch.randint(-2, 3, shape, device=device).to(dtype)


def errors_of_far_logits(
    rows: int, keys: int, heads: tuple[int, int], dtype: torch.dtype, device: Any,
    variant: wl.Variant | None = None, constant: float | None = None,
) -> dict[float, tuple[float, float]]:  # fmt: skip
    """Largest error of the output, and relative one of log-sum-exp, by scale of the logits.

    Args:
        rows, keys: of the one request.
        heads: of queries, and of keys and values.
        dtype, device: of all tensors.
        variant: of attention, none or one that doubles logits.
        constant: of all queries and keys, in place of random numbers: all logits are the same.
    """
    num_q_heads, num_kv_heads = heads
    q = integers(1, rows, num_q_heads, 64, dtype=dtype, device=device)
    k = integers(1, keys, num_kv_heads, 64, dtype=dtype, device=device)
    if constant is not None:
        q, k = torch.full_like(q, constant), torch.full_like(k, constant)
    v = torch.randn(1, keys, num_kv_heads, 64, device=device).to(dtype)
    repeated = (x.double().repeat_interleave(num_q_heads // num_kv_heads, dim=2) for x in (k, v))
    wide_k, wide_v = repeated
    products = torch.einsum("brhd,bkhd->bhrk", q.double(), wide_k)
    found = {}
    for scale in SCALES:
        factor = scale if variant is None else 2 * scale
        logits = products * factor
        expected = torch.einsum("bhrk,bkhd->brhd", torch.softmax(logits, -1), wide_v)
        sums = torch.logsumexp(logits, -1).transpose(1, 2)
        out, lse = wl.attention(q, k, v, variant=variant, sm_scale=scale, return_lse=True)
        relative = (lse.double() - sums).abs() / sums.abs().clamp_min(1.0)
        found[scale] = float((out.double() - expected).abs().max()), float(relative.max())
    return found
