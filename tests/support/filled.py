"""Padding by an additive bias, as PyTorch users write it."""

from __future__ import annotations

from typing import Any

import torch

import warploom as wl

FILLS = (-1e9, -1e10, -1e30, torch.finfo(torch.float32).min)
_KEYS, _PADDING = 1000, 600


class Filled(wl.Variant):
    bias = wl.Tensor("float32", ("kv_pos",))

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return logits + self.bias[at.kv_pos]


def filled_and_cut(
    fill: float, q: torch.Tensor, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [1, rows, heads, dim] to keys of which the first are filled, or left out."""
    k, v = torch.randn(2, 1, _KEYS, num_kv_heads, q.shape[-1], device=q.device, dtype=q.dtype)
    bias = torch.zeros(_KEYS, device=q.device)
    bias[:_PADDING] = fill
    filled = wl.attention(q, k, v, variant=Filled(bias=bias))
    cut = wl.attention(q, k[:, _PADDING:], v[:, _PADDING:], variant=wl.Variant())
    return filled, cut
