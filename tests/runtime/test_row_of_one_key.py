"""Rows that one key decides: its weight is exact in portable tiles, however keys come."""

from __future__ import annotations

import pytest
import torch

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("tile", [TileConfig(64, 32, 2, 2), TileConfig(16, 64, 2, 2)], ids=str)
def test_the_largest_weight_is_one_whichever_tile_it_is_in(tile: TileConfig) -> None:
    setup = Setup(wl.Ragged(), "bfloat16", 128, 128, tile=tile)
    # Of 55 keys that a row sees, one of the second tile has a weight of 0.85.
    case = Case(setup, (16, 35, 5, 1), (129, 40, 59, 0), scale=4.0, seed=446)
    assert mismatch(wl.Causal(), case) is None


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("tile", [TileConfig(8, 128, 4, 2), TileConfig(16, 32, 2, 3)], ids=str)
def test_a_scale_of_a_token_is_rounded_with_its_weight_and_no_more(tile: TileConfig) -> None:
    """In bfloat16. So the output of one key is rounded twice, where the functors' own is once: on
    a GPU 4.25 came of 4.27641 = 3.25 * 1.31582, which is 2.2 times the error of the naive twin."""
    torch.manual_seed(0)
    keys = 40  # a request has one of them each
    q, stored = torch.randn(keys, 1, 128).bfloat16(), torch.randn(2, keys, 16, 1, 128)
    k, v = stored.to(torch.float8_e4m3fn)
    scale = torch.randn(keys, 1, 1)
    attention = wl.AttentionWrapper(
        wl.TokenKVScale(scale, scale), kv_format=wl.Paged(16), num_q_heads=1, head_dim=128,
        dtype="bfloat16", kv_dtype="float8_e4m3fn", device="cpu", tile=tile,
    )  # fmt: skip
    starts = list(range(keys + 1))
    attention.plan(starts, starts, starts[:-1], [1] * keys)
    once = scale.bfloat16().float() * v[:, 0].float()
    low, high = ((once * (1 + tiny)).bfloat16() for tiny in (-1e-6, 1e-6))  # of ties, either
    out = attention.run(q, (k, v))
    assert torch.all((out == low) | (out == high))
