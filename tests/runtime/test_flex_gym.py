"""Masks and biases as attention-gym has them: torch's own eager result, and ours on the CPU."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import warploom as wl

BATCH, HEADS, TOKENS, DIM = 2, 4, 128, 16
WIDTH, HEIGHT, KERNEL = 8, 16, 5  # of a canvas whose cells are the tokens
Mod = Callable[..., Any]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def documents() -> Mod:
    """Causal within documents, whose positions begin anew."""
    offsets = torch.tensor([0, 40, 90, TOKENS], dtype=torch.int32)
    document = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), offsets.diff())

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_logical = q_idx - offsets[document[q_idx]]
        kv_logical = kv_idx - offsets[document[kv_idx]]
        return (document[q_idx] == document[kv_idx]) & causal(b, h, q_logical, kv_logical)

    return mask_mod


def prefix_lm() -> Mod:
    lengths = torch.tensor([20, 60])
    return torch_flex.or_masks(lambda b, h, q_idx, kv_idx: kv_idx < lengths[b], causal)


def window(offset: Any) -> Mod:
    """A window over rows that begin at an offset, as those of a decoding step."""

    def recent(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= 17

    both = torch_flex.and_masks(recent, causal)
    return lambda b, h, q_idx, kv_idx: both(b, h, q_idx + offset, kv_idx)


def neighbours(place: Callable[[Any], tuple[Any, Any]]) -> Mod:
    """NATTEN's: a square of cells around each, which the canvas's edges push inside."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        (q_x, q_y), (kv_x, kv_y) = place(q_idx), place(kv_idx)
        x = q_x.clamp(KERNEL // 2, (WIDTH - 1) - KERNEL // 2)
        y = torch.clamp(q_y, KERNEL // 2, (HEIGHT - 1) - KERNEL // 2)
        return ((x - kv_x).abs() <= KERNEL // 2) & ((y - kv_y).abs() <= KERNEL // 2)

    return mask_mod


def of_morton(index: Any) -> tuple[Any, Any]:
    def every_other_bit(x: Any) -> Any:
        for shift, kept in ((0, 0x55555555), (1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF)):
            x = (x ^ (x >> shift) if shift else x) & kept
        return x

    return every_other_bit(index), every_other_bit(index >> 1)


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (kv_idx - q_idx) * torch.exp2(-((h + 1) * 8.0 / HEADS))


def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0)


def buckets() -> Mod:
    """T5's: far distances share logarithmic buckets."""
    table = torch.randn(32, HEADS)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        back = torch.maximum(q_idx - kv_idx, torch.zeros_like(q_idx))
        far = 16 + (torch.log(back.float() / 16) / math.log(8) * 16).to(torch.int64)
        far = torch.min(far, torch.full_like(far, 31))
        return score + table[torch.where(back < 16, back, far), h]

    return score_mod


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("rows", "score_mod", "mask_mod"),
    [
        (TOKENS, None, documents()),
        (4, alibi, window(torch.tensor(100))),
        (TOKENS, soft_cap, prefix_lm()),
        (TOKENS, None, neighbours(lambda index: (index % WIDTH, index // WIDTH))),
        (TOKENS, None, neighbours(of_morton)),
        (TOKENS, buckets(), None),
    ],
    ids=["documents", "window", "prefix", "neighbours", "morton", "buckets"],
)
def test_what_users_bring_agrees_with_torch(rows: int, score_mod: Any, mask_mod: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(BATCH, HEADS, rows, DIM, generator=generator)
    k, v = torch.randn(2, BATCH, HEADS, TOKENS, DIM, generator=generator)
    mask = None
    if mask_mod is not None:
        mask = torch_flex.create_block_mask(mask_mod, BATCH, None, rows, TOKENS, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torch_flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)
    found = wl.flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
