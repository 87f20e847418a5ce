"""Integers of functors have 32 bits, and wrap."""

from __future__ import annotations

from typing import Any

import torch

import warploom as wl


class HashSparse(wl.Variant):
    """Low bits of a product that does not fit: the same with and without wrapping."""

    def logits_mask(self, at: wl.Position) -> Any:
        return ((at.kv_pos * 1103515245 + 12345) & 1023) < 300


def test_integers_wrap() -> None:
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 256, 1, 16), torch.eye(256)[None, :, None]
    seen = wl.attention(q, k, v, variant=HashSparse())[0, 0, 0] > 0
    assert seen.tolist() == [((j * 1103515245 + 12345) & 1023) < 300 for j in range(256)]
