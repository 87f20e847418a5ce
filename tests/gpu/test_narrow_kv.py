"""8-bit keys and values on a GPU: every tile, format, hook and scale against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.hopper_jobs import Biased

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.errors import BadHeadDim, WrongDType
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.testing import run_property, warm_up

pytestmark = pytest.mark.gpu

E4M3, E5M2, I8 = "float8_e4m3fn", "float8_e5m2", "int8"
SMALL, DEEP = TileConfig(16, 32, 2, 3), TileConfig(16, 128, 4, 2)
EIGHT = TileConfig(8, 128, 4, 2)
WIDE, PAIR = TileConfig(64, 128, 4, 2, "hopper", 2), TileConfig(128, 128, 8, 2, "hopper", 2)
MIDDLE, TALL = TileConfig(64, 32, 2, 2), TileConfig(128, 64, 8, 2)
NARROW = replace(PAIR, keys=96)
SINGLE = TileConfig(1, 128, 4, 1)
POOL = [
    (wl.TokenKVScale(), Setup(wl.Paged(16), "bfloat16", 128, 128, "cuda", SINGLE, E4M3)),
    (wl.HeadKVScale(), Setup(wl.Paged(5, layout="HND"), "float16", 96, 64, "cuda", SINGLE, E5M2)),
    (wl.Variant(), Setup(wl.Paged(16), "bfloat16", 128, 128, "cuda", SMALL, E4M3)),
    (wl.Variant(), Setup(wl.Paged(1), "float16", 128, 128, "cuda", DEEP, E5M2)),
    (wl.TokenKVScale(), Setup(wl.Paged(16), "bfloat16", 128, 128, "cuda", EIGHT, E4M3)),
    (
        wl.Causal() & wl.KVScale(0.5, 2.0) & wl.SoftCap(5.0),
        Setup(wl.Paged(3), "float16", 96, 64, "cuda", EIGHT, E5M2),
    ),
    (
        wl.Causal() & wl.KVScale(0.3, 2.5),
        Setup(wl.Ragged(), "bfloat16", 64, 64, "cuda", DEEP, E5M2),
    ),
    (wl.HeadKVScale(), Setup(wl.Paged(5, layout="HND"), "float16", 96, 64, "cuda", SMALL, E4M3)),
    (wl.TokenKVScale(), Setup(wl.Paged(16), "bfloat16", 128, 128, "cuda", SMALL, E4M3)),
    (
        wl.Causal() & wl.TokenKVScale() & wl.SoftCap(5.0),
        Setup(wl.Paged(3), "float16", 256, 256, "cuda", TileConfig(16, 64, 4, 2), E4M3),
    ),
    (
        wl.Causal() & wl.KVScale(0.5, 2.0) & wl.Rope(),
        Setup(wl.Paged(16), "bfloat16", 128, 128, "cuda", SMALL, E4M3),
    ),
    (
        wl.TokenKVScale(),
        Setup(wl.BlockSparse(block=(16, 8)), "float16", 64, 64, "cuda", MIDDLE, E5M2),
    ),
    (wl.SlidingWindow(40), Setup(wl.Paged(7), "bfloat16", 48, 80, "cuda", MIDDLE, E4M3)),
    (wl.Causal() & wl.QKNorm(), Setup(wl.Ragged(), "float16", 16, 32, "cuda", MIDDLE, E4M3)),
    (wl.Causal(), Setup(wl.Paged(16), "bfloat16", 128, 128, "cuda", TALL, E4M3)),
    (
        wl.TokenKVScale() & wl.FlashSigmoid(bias=-2.0),
        Setup(wl.Dense(), "bfloat16", 64, 128, "cuda", TALL, E5M2),
    ),
    (wl.TokenKVScale(), Setup(wl.Paged(16), "bfloat16", 128, 128, "cuda", SINGLE, I8)),
    (wl.KVScale(0.2, 0.1), Setup(wl.Paged(1), "bfloat16", 128, 128, "cuda", SMALL, I8)),
    (wl.Causal() & wl.Rope(), Setup(wl.Paged(16), "float16", 64, 64, "cuda", MIDDLE, I8)),
    (wl.HeadKVScale(), Setup(wl.Ragged(), "bfloat16", 128, 128, "cuda", TALL, I8)),
    (wl.Causal(), Setup(wl.Paged(16), "bfloat16", 128, 128, "cuda", PAIR, E4M3)),
    (wl.HeadKVScale(), Setup(wl.Ragged(), "float16", 128, 128, "cuda", WIDE, I8)),
    (wl.SlidingWindow(40), Setup(wl.Paged(7), "bfloat16", 112, 128, "cuda", PAIR, E5M2)),
    (wl.Causal() & wl.Rope(), Setup(wl.Paged(16), "bfloat16", 128, 128, "cuda", PAIR, E4M3)),
    (wl.TokenKVScale(), Setup(wl.Paged(1), "float16", 128, 128, "cuda", PAIR, E4M3)),
    (wl.FlashSigmoid(bias=-2.0), Setup(wl.Dense(), "bfloat16", 128, 128, "cuda", PAIR, E5M2)),
    (wl.Causal(), Setup(wl.BlockSparse(block=(16, 8)), "float16", 128, 128, "cuda", WIDE, E4M3)),
]
# Consumers widen a tile ahead: rows of several requests, and hooks that read numbers.
AHEAD = [
    (
        wl.Causal() & wl.SoftCap(5.0),
        Setup(wl.Composed(16), "bfloat16", 128, 128, "cuda", PAIR, E4M3),
    ),
    (wl.DocumentMask(), Setup(wl.Composed(4), "float16", 128, 128, "cuda", PAIR, E5M2)),
    (wl.DocumentMask(), Setup(wl.Paged(16), "bfloat16", 128, 128, "cuda", PAIR, E4M3)),
    (Biased(), Setup(wl.Ragged(), "float16", 112, 128, "cuda", PAIR, I8)),
    (
        wl.Causal() & wl.QKNorm() & wl.Rope(),  # gathered, and so in 96 keys
        Setup(wl.Paged(1), "bfloat16", 128, 128, "cuda", NARROW, E4M3),
    ),
]


def test_random_batches_agree_with_the_oracle() -> None:
    run_property(warm_up(POOL), None, max_examples=150)


def test_random_batches_that_are_widened_ahead_agree_with_the_oracle() -> None:
    run_property(warm_up(AHEAD), None, max_examples=60)


def test_long_requests_are_split_and_merged() -> None:
    for variant, setup in warm_up([*POOL, *AHEAD]):
        q_len = (2, 2) if isinstance(setup.kv_format, wl.Dense) else (3, 1)
        case = Case(setup, q_len, (1500, 700), num_kv_heads=1, group_size=4, seed=1)
        found = mismatch(variant, case)
        assert found is None, f"{variant!r} {case}: {found}"


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_is_widened_exactly(kv_dtype: Any, dtype: Any, cuda: Any) -> None:
    """One key is all the attention of a row, so that the output is its value, bit for bit."""
    codes = torch.arange(256, device=cuda, dtype=torch.uint8).view(kv_dtype)
    v = codes.view(1, 1, 1, 256).contiguous()
    k = torch.ones(1, 1, 1, 64, device=cuda, dtype=dtype).to(kv_dtype)
    q = torch.ones(1, 1, 1, 64, device=cuda, dtype=dtype)
    out = wl.attention(q, k, v)
    expected = codes.to(dtype)
    assert torch.equal(out.flatten().isnan(), expected.isnan())
    assert torch.equal(out.flatten().nan_to_num(), expected.nan_to_num())
    # and the keys: one lane of each query picks out a code
    k = codes.view(1, 1, 1, 256).contiguous()
    eye = torch.eye(256, device=cuda, dtype=dtype).view(1, 256, 1, 256)
    finite = codes.float().isfinite()
    k = torch.where(finite, k.float(), 0.0).to(kv_dtype)
    _, lse = wl.attention(eye, k, v, sm_scale=1.0, return_lse=True)
    torch.testing.assert_close(lse.flatten(), k.flatten().float(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("decode", [None, EIGHT], ids=["by a group", "by consumers"])
def test_hopper_widens_every_number_exactly(
    kv_dtype: Any, dtype: Any, decode: Any, cuda: Any
) -> None:
    """Row r of the queries asks key r by its own lane, and one key is all that a row sees."""
    codes = torch.arange(256, device=cuda, dtype=torch.uint8).view(2, 128).view(kv_dtype)
    codes = torch.where(codes.float().isfinite(), codes.float(), 0.0).to(kv_dtype)
    kv = codes.view(2, 1, 1, 128)  # two requests of one key
    q = torch.eye(128, device=cuda, dtype=dtype).repeat(2, 1).view(256, 1, 128)
    attention = wl.AttentionWrapper(
        kv_format=wl.Paged(1), num_q_heads=1, head_dim=128, dtype=dtype, kv_dtype=kv_dtype,
        device=cuda, tile=replace(PAIR, decode=decode), sm_scale=1.0,
    )  # fmt: skip
    attention.plan([0, 128, 256], [0, 1, 2], [0, 1], [1, 1])
    out, lse = attention.run(q, (kv, kv), return_lse=True)
    assert torch.equal(out.view(2, 128, 128), codes.to(dtype)[:, None].expand(2, 128, 128))
    torch.testing.assert_close(lse.flatten(), codes.flatten().float(), rtol=1e-6, atol=0.0)


def test_what_does_not_fit_is_refused(cuda: Any) -> None:
    with pytest.raises(BadHeadDim, match="multiple of 16"):
        wl.AttentionWrapper(num_q_heads=1, head_dim=72, kv_dtype=E4M3, device=cuda)
    attention = wl.AttentionWrapper(num_q_heads=1, head_dim=64, kv_dtype=E4M3, device=cuda)
    attention.plan([0, 1], [0, 4])
    q, kv = (torch.ones(n, 1, 64, device=cuda, dtype=torch.float16) for n in (1, 4))
    with pytest.raises(WrongDType, match="float8_e4m3fn"):
        attention.run(q, (kv, kv))
    assert "float8_e4m3fn" in str(attention.explain())
