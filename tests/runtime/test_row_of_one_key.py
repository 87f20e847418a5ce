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
@pytest.mark.parametrize("tells", [False, True], ids=["weights take scales", "values do"])
def test_a_value_times_the_scale_of_its_token_is_rounded_once(
    tile: TileConfig, tells: bool
) -> None:
    """As the functor's own is, whatever the scale."""
    torch.manual_seed(0)
    keys = 40  # a request has one of them each
    q, stored = torch.randn(keys, 1, 128).bfloat16(), torch.randn(2, keys, 16, 1, 128)
    k, v = stored.to(torch.float8_e4m3fn)
    scale = torch.randn(keys, 1, 1) * torch.linspace(-60, 60, keys).exp2().view(keys, 1, 1)
    attention = wl.AttentionWrapper(
        wl.TokenKVScale(None, scale), kv_format=wl.Paged(16), num_q_heads=1, head_dim=128,
        dtype="bfloat16", kv_dtype="float8_e4m3fn", device="cpu", tile=tile, max_scores=tells,
    )  # fmt: skip
    starts = list(range(keys + 1))
    attention.plan(starts, starts, starts[:-1], [1] * keys)
    out = attention.run(q, (k, v), k_scale=torch.ones(keys, 1, 1))
    exact = scale.double() * v[:, 0].double()
    low, high = ((exact * (1 + tiny)).bfloat16() for tiny in (-1e-5, 1e-5))  # of ties, either
    assert torch.all((out == low) | (out == high))


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("tile", [TileConfig(8, 128, 4, 2), TileConfig(16, 32, 2, 3)], ids=str)
def test_a_row_whose_scale_was_rounded_with_its_weight(tile: TileConfig) -> None:
    """And then with the output: on a GPU 4.25 came of 4.27641 = 3.25 * 1.31582."""
    setup = Setup(wl.Paged(16), "bfloat16", 128, 128, "cpu", tile, "float8_e4m3fn")
    case = Case(setup, (3, 36), (127, 1), num_kv_heads=1, group_size=3, scale=1.0, seed=64)
    assert mismatch(wl.TokenKVScale(), case) is None
