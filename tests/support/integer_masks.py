"""Masks whose integers do not fit 32 bits, and wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import warploom as wl
from warploom.dsl.reference import visible

KEYS = 96
LARGEST = 2**31 - 1


class Wraps(wl.Variant):
    """A mask of one condition."""

    number = wl.Scalar("int32", default=LARGEST)
    table = wl.Tensor("int32", (None,))

    def __init__(self, condition: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.table = torch.tensor([3, -7, LARGEST, -(2**31), 40, 2**30], dtype=torch.int32)
        self.condition = condition

    def logits_mask(self, at: wl.Position) -> Any:
        return self.condition(self, at) & (at.kv_pos >= 0)


CONDITIONS: dict[str, Callable[[Any, Any], Any]] = {
    "low bits": lambda self, at: ((at.kv_pos * 1103515245 + 12345) & 1023) < 300,
    "high bits": lambda self, at: (at.kv_pos * 2654435 * 809 + at.q_pos) % 1000 < 500,
    "a product compared": lambda self, at: at.kv_pos * 100_000_000 < 500,
    "a square": lambda self, at: (at.kv_pos * 1000) ** 3 > at.q_pos,
    "a NumPy exponent": lambda self, at: (at.kv_pos * 1000) ** np.int64(3) > at.q_pos,
    "its bits": lambda self, at: (at.kv_pos ** np.array(2) & 7) < 4,
    "a float exponent": lambda self, at: ((at.kv_pos - 40) * 65536) ** 3.0 > at.q_pos,
    "a far sum": lambda self, at: at.kv_pos + self.number <= at.q_pos,
    "a far difference": lambda self, at: 20 - at.kv_pos - self.number < at.q_pos,
    "of a division": lambda self, at: (at.kv_pos + self.number) // 5 < at.q_pos // 5,
    "bounds beyond 64 bits": lambda self, at: (
        (((at.kv_pos * 4) // 2**30) // 8 <= self.number) & (at.kv_pos < 40)
    ),
    "a tensor": lambda self, at: self.table[at.kv_pos % 6] + at.kv_pos * 2 > at.q_pos,
    "an index": lambda self, at: self.table[at.kv_pos * self.number] > 3,
    "a smallest size": lambda self, at: abs(self.table[at.kv_pos // 20] - 1) > 40,
    "a smallest negation": lambda self, at: -self.table[at.kv_pos // 20] > 0,
    "a smallest division": lambda self, at: self.table[at.kv_pos // 20] // -1 > 0,
    "left shifts": lambda self, at: (3 << (at.kv_pos - 20)) > at.q_pos,
    "right shifts": lambda self, at: (-64 >> (at.kv_pos - 20)) < -3,
    "large floats": lambda self, at: wl.to_int((at.kv_pos - 48) * 1e8) - 5 < at.q_pos,
    "no numbers": lambda self, at: wl.to_int(wl.sqrt(wl.to_float(20 - at.kv_pos))) == 0,
    "a negative power": lambda self, at: (at.kv_pos + 1) ** -1 > 0.05,
}


def seen_by_attention(variant: wl.Variant, device: Any, dtype: torch.dtype) -> list[list[bool]]:
    """What each of 5 rows sees, by a kernel: values tell keys from each other."""
    q, k = (torch.zeros(1, n, 1, 16, device=device, dtype=dtype) for n in (5, KEYS))
    v = torch.eye(KEYS, device=device, dtype=dtype)[None, :, None]
    out = wl.attention(q, k, v, variant=variant)
    return (out[0, :, 0] > 0).tolist()  # type: ignore[no-any-return]


def seen_by_functor(variant: wl.Variant) -> np.ndarray[Any, Any]:
    seen = visible(variant, q_len=5, kv_len=KEYS)
    assert 0 < seen.sum() < seen.size
    return seen
