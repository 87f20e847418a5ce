"""Scales of values that weights are multiplied with: a row's reference counts them."""

from __future__ import annotations

import math

import pytest
import torch

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch

E4M3 = "float8_e4m3fn"
TILES = [TileConfig(8, 64, 2, 2), TileConfig(16, 32, 2, 2), TileConfig(64, 32, 2, 2)]


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("tile", [TileConfig(8, 128, 4, 2), TileConfig(16, 32, 2, 3)], ids=str)
@pytest.mark.parametrize("tells", [False, True], ids=["weights take scales", "values do"])
def test_a_value_times_the_scale_of_its_token_is_rounded_once(
    tile: TileConfig, tells: bool
) -> None:
    """As the functor's own is, up to scales of 2^48."""
    torch.manual_seed(0)
    keys = 40  # a request has one of them each
    q, stored = torch.randn(keys, 1, 128).bfloat16(), torch.randn(2, keys, 16, 1, 128)
    k, v = stored.to(torch.float8_e4m3fn)
    scale = torch.randn(keys, 1, 1) * torch.linspace(-45, 45, keys).exp2().view(keys, 1, 1)
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


@pytest.mark.some(4)
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("low", "high"), [(0.0, 2.0**62), (2.0**-62, 2.0**64), (2.0**40, 0.0)])
@pytest.mark.parametrize("keys", [256, 4000], ids=["one CTA", "split"])
def test_keys_count_in_the_sum_however_far_their_scales_are_apart(
    tile: TileConfig, low: float, high: float, keys: int
) -> None:
    """References of warps, of tiles and of CTAs are as far apart then, and equal keys are half of
    the sum each."""
    attention = wl.AttentionWrapper(
        wl.TokenKVScale(), kv_format=wl.Ragged(), num_q_heads=1, head_dim=64, dtype="bfloat16",
        device="cpu", tile=tile,
    )  # fmt: skip
    q, kv = torch.zeros(1, 1, 64).bfloat16(), torch.zeros(2, keys, 1, 64).bfloat16()
    kv[1] = 1.0
    scale = torch.full((1, keys, 1), low)
    scale[:, keys // 2 :] = high
    attention.plan([0, 1], [0, keys])
    out, lse = attention.run(
        q, (kv[0], kv[1]), return_lse=True, k_scale=torch.ones(1, keys, 1), v_scale=scale
    )
    assert lse.item() == pytest.approx(math.log(keys), abs=1e-5)
    assert torch.all((out.float() / ((low + high) / 2) - 1).abs() < 1e-2)


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("tile", [TileConfig(8, 64, 2, 2), TileConfig(16, 32, 2, 2)], ids=str)
@pytest.mark.parametrize("stored", [E4M3, "float8_e5m2", "int8"])
def test_half_precision_over_8_bits_agrees_with_the_oracle(tile: TileConfig, stored: str) -> None:
    setup = Setup(wl.Paged(16), "float16", 128, 128, "cpu", tile, stored)
    case = Case(setup, (3, 36), (127, 41), num_kv_heads=2, group_size=3, scale=1.0, seed=5)
    assert mismatch(wl.Causal() & wl.TokenKVScale(), case) is None
