"""Numbers at the ends of a type's range: every CUDA tile gives what they give together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.emulator import Emulator

import warploom as wl
from warploom.codegen.source import TileConfig

TILES = {
    "one row": TileConfig(1, 64, 2, 1),
    "16 rows": TileConfig(16, 32, 2, 2),
    "8 rows": TileConfig(8, 32, 2, 2),
    "64 rows": TileConfig(64, 32, 2, 2),
}
KEYS, DIM = 256, 64
E4M3 = "float8_e4m3fn"


class Scaled(wl.Variant):
    """Values are stored in other units."""

    scale = wl.Scalar("float32")

    def value_transform(self, v: Any, at: wl.Position) -> Any:
        return v * self.scale


def attend(
    variant: wl.Variant,
    tile: TileConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    **inputs: Any,
) -> torch.Tensor:
    """Of one request whose only query row is q [1, 1, DIM], with k and v [keys, 1, DIM]."""
    wrapper = wl.AttentionWrapper(
        variant,
        kv_format=wl.Ragged(),
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=DIM,
        dtype=str(q.dtype).removeprefix("torch."),
        kv_dtype=str(k.dtype).removeprefix("torch."),
        device="cpu",
        tile=tile,
    )
    wrapper.plan([0, 1], [0, len(k)])
    result = wrapper.run(q, (k, v), **inputs)
    assert isinstance(result, torch.Tensor)
    return result[0, 0]


@pytest.mark.some(3)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize(("scale", "first", "value"), [(500.0, -5.0, 1.0), (1e-4, 9.0, 96.0)])
@pytest.mark.parametrize("stored", [E4M3, "float16"])
def test_scales_of_values_keep_the_range_of_half_precision(
    emulator: Emulator, tile: TileConfig, scale: float, first: float, value: float, stored: str
) -> None:
    """As a half, a weight times its value's scale would be infinite, or have few digits left.

    Logits that come late may be weighed up to 256. The heaviest key has the value 0.
    """
    if stored == "float16" and tile.rows == 1:
        tile = TileConfig(1, 128, 4, 1)
    dtype = getattr(torch, stored)
    q, k = torch.zeros(1, 1, DIM), torch.zeros(KEYS, 1, DIM)
    q[0, 0, 0], k[: 64 if first < 0 else 1, 0, 0] = 8.0, first
    v = torch.full((KEYS, 1, DIM), value)
    v[0] = 0.0
    if stored == E4M3:
        variant: wl.Variant = wl.TokenKVScale(
            torch.ones(1, KEYS, 1), torch.full((1, KEYS, 1), scale)
        )
        inputs = {}
    else:
        variant, inputs = Scaled(), {"scale": scale}
    out = attend(variant, tile, q.half(), k.to(dtype), v.to(dtype), **inputs)
    weights = torch.softmax(k[:, 0, 0].double(), 0)  # 8 / sqrt(DIM) is 1
    expected = scale * (weights @ v[:, 0].double())
    assert torch.allclose(out.double(), expected, rtol=2e-3, atol=0), (out[0], expected[0])


@pytest.mark.some(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_an_infinite_value_that_is_seen_is_infinite(
    emulator: Emulator, tile: TileConfig, dtype: torch.dtype
) -> None:
    """The last tile of a warp has places without keys: they must not bring in the tile before."""
    torch.manual_seed(0)
    elements = torch.float16 if dtype == torch.float8_e5m2 else dtype
    q = torch.randn(1, 1, DIM).to(elements)
    k, v = (torch.randn(100, 1, DIM).to(dtype) for _ in range(2))
    finite = attend(wl.Variant(), tile, q, k, v)
    for key in range(0, 100, 7):
        changed = v.float()
        changed[key, 0, 0] = math.inf
        out = attend(wl.Variant(), tile, q, k, changed.to(dtype))
        assert out[0] == math.inf, key
        assert torch.equal(out[1:], finite[1:]), key
