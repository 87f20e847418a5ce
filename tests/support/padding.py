"""Keys and values behind the end of a request, in tensors that are as long as the longest."""

from __future__ import annotations

import math

import torch

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value

_LENGTHS, _KEYS = (5, 40, 77), 96


class Shorter(wl.Variant):
    """A mask that says how long each request is."""

    length = wl.Tensor("int32", ("batch",))

    def logits_mask(self, at: Position) -> Value:
        return at.kv_pos < self.length[at.batch]


def with_and_without_garbage(
    rows: int, num_q_heads: int, device: str = "cpu", tile: TileConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention where no row sees what is no number, and where zeros are in its place."""
    batch, dim, dtype = len(_LENGTHS), 64, torch.float16
    attention = wl.AttentionWrapper(
        Shorter(length=torch.tensor(_LENGTHS, dtype=torch.int32, device=device)),
        kv_format=wl.Dense(), num_q_heads=num_q_heads, num_kv_heads=2, head_dim=dim, dtype=dtype,
        device=device, tile=tile,
    )  # fmt: skip
    attention.plan([i * rows for i in range(batch + 1)], [i * _KEYS for i in range(batch + 1)])
    q = torch.randn(batch, rows, num_q_heads, dim, device=device, dtype=dtype)
    k, v = torch.randn(2, batch, _KEYS, 2, dim, device=device, dtype=dtype)
    found = []
    for filler in (math.nan, 0.0):
        for request, length in enumerate(_LENGTHS):
            k[request, length:] = v[request, length:] = filler
        found.append(attention.run(q, (k, v)))
    return found[0], found[1]
