"""The portable kernel on a GPU, tile by tile, also tiles that no choice for this GPU takes."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import pytest
import torch

import warploom as wl
from warploom.codegen.attention.templates import SINGLE_ROW
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.trace import trace
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.testing import warm_up

pytestmark = pytest.mark.gpu


class ScaledValues(wl.Variant):
    """Value and output transforms that turn absent keys and rows into numbers, if they are met."""

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * (1.0 + 0.01 * at.lane) + 0.5

    def output_transform(self, o: Value, at: Position) -> Value:
        return o * wl.rsqrt(wl.sum(o * o) / at.head_dim + 1e-6) + 0.1 * at.lse


TILES = [
    TileConfig(1, 64, 4, 1),
    TileConfig(1, 128, 4, 1),
    TileConfig(8, 64, 4, 3),
    TileConfig(8, 128, 4, 2),
    TileConfig(16, 32, 2, 3),
    TileConfig(16, 64, 4, 3),
    TileConfig(16, 128, 4, 2),
    TileConfig(64, 32, 2, 2),
    TileConfig(64, 32, 4, 2),
    TileConfig(64, 64, 4, 2),
    TileConfig(128, 32, 4, 3),
    TileConfig(128, 64, 4, 2),
    TileConfig(128, 64, 8, 2),
]
FORMATS = [
    wl.Ragged(),
    wl.Paged(16),
    wl.Paged(1),
    wl.BlockSparse(block=(16, 8)),
    wl.Paged(5, layout="HND"),
    wl.BlockSparse(block=(7, 5)),
    wl.BlockSparse(block=(32, 128)),
    wl.Rolling(170, 3),  # room for chunks of 70 rows under a window, which a shorter ring refuses
    wl.Rolling(64, positions="cache", layout="HND"),
]
VARIANTS = [
    wl.Variant(),
    wl.Causal(),
    wl.Causal() & wl.SoftCap(3.0),
    wl.SlidingWindow(40),
    wl.Causal() & wl.Alibi(),
    wl.Causal() & wl.QKNorm(),
    wl.Causal() & wl.Rope(),
    wl.Causal() & ScaledValues(),
    wl.Causal() & wl.FlashSigmoid(bias=-2.0),
    wl.DocumentMask(),
]
HEAD_DIMS = [(64, 64), (128, 128), (40, 72), (96, 64), (8, 8)]


def obstacle(variant: wl.Variant) -> str | None:
    """Why one row cannot be computed without staging."""
    bfloat16 = dtype("bfloat16")
    return SINGLE_ROW.obstacle(AttentionSpec(trace(variant), 64, 64, bfloat16, wl.Ragged()))


def kernels(tile: TileConfig) -> Any:
    """One kernel per variant; formats, types and head dimensions are walked through in step."""
    start = TILES.index(tile)
    variants = VARIANTS if tile.rows > 1 else [x for x in VARIANTS if not obstacle(x)]
    formats = islice(cycle(FORMATS), start, None)
    dims = islice(cycle(HEAD_DIMS), start, None)
    types = islice(cycle(("float16", "bfloat16")), start, None)
    return warm_up(
        [
            (variant, Setup(kv_format, dtype, *dim, "cuda", tile))
            for variant, kv_format, dtype, dim in zip(variants, formats, types, dims, strict=False)
        ]
    )


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.rows}x{t.keys}w{t.warps}")
def test_each_tile_agrees_with_the_oracle(tile: TileConfig) -> None:
    for variant, setup in kernels(tile):
        for q_lens, kv_lens, scale, sm_limit in (
            ((70, 1, 0, 33), (130, 257, 40, 33), 1.0, None),
            ((3, 1, 1), (0, 1, 1200), 1.0, None),
            ((5, 129), (64, 128), 8.0, None),
            ((150, 2, 0, 90, 1), (30, 0, 40, 70, 300), 1.0, 2),
        ):
            case = Case(setup, q_lens, kv_lens, 2, 2, scale, seed=7, sm_limit=sm_limit)
            found = mismatch(variant, case)
            assert found is None, f"{variant!r} {case}: {found}"


@pytest.mark.parametrize(
    "tile",
    [
        TileConfig(1, 512, 16, 1),
        TileConfig(1, 1024, 32, 1),
        TileConfig(8, 192, 12, 2),
        TileConfig(16, 192, 12, 2),
        TileConfig(256, 64, 16, 2),
        TileConfig(512, 16, 32, 2),
    ],
    ids=lambda t: f"{t.rows}x{t.keys}w{t.warps}",
)
def test_ctas_of_many_warps(tile: TileConfig, cuda: Any) -> None:
    """What the hardware runs, and the compiler gives fewer registers than such tiles have alone."""
    jobs = [
        (wl.Causal(), Setup(wl.Paged(16), "bfloat16", 64, 64, "cuda", tile)),
        (wl.SlidingWindow(40), Setup(wl.Ragged(), "float16", 32, 64, "cuda", tile)),
    ]
    for variant, setup in warm_up(jobs):
        for q_lens, kv_lens in (((70, 1, 0, 600), (130, 257, 40, 700)), ((1, 3), (1500, 0))):
            case = Case(setup, q_lens, kv_lens, 2, 2, seed=7)
            assert mismatch(variant, case) is None


def test_wide_heads(cuda: Any) -> None:
    jobs = [
        (wl.Causal(), Setup(wl.Paged(16), "bfloat16", 256, 256, "cuda", TileConfig(64, 64, 4, 2))),
        (wl.Causal(), Setup(wl.Ragged(), "float16", 256, 256, "cuda", TileConfig(128, 64, 8, 2))),
        (wl.Causal(), Setup(wl.Paged(3), "float16", 192, 128, "cuda", TileConfig(16, 64, 4, 2))),
        (wl.Causal(), Setup(wl.Paged(16), "float16", 256, 256, "cuda", TileConfig(1, 64, 4, 1))),
        (wl.Causal(), Setup(wl.Paged(3), "bfloat16", 192, 128, "cuda", TileConfig(1, 64, 4, 1))),
    ]
    for variant, setup in warm_up(jobs):
        case = Case(setup, (130, 1), (200, 333), num_kv_heads=1, group_size=4)
        assert mismatch(variant, case) is None


@pytest.mark.parametrize("sm_scale", [0.0, -0.3, 2.0])
def test_a_scale_may_have_any_sign(sm_scale: float, cuda: Any) -> None:
    q, k, v = torch.randn(3, 40, 4, 64, device=cuda, dtype=torch.float16)
    attention = wl.AttentionWrapper(
        wl.Causal(), num_q_heads=4, head_dim=64, sm_scale=sm_scale, device=cuda,
        tile=TileConfig(64, 64, 4, 2),
    )  # fmt: skip
    attention.plan([0, 40], [0, 40])
    q4, k4, v4 = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q4, k4, v4, is_causal=True, scale=sm_scale
    )
    out = attention.run(q, (k, v))
    torch.testing.assert_close(out.float(), expected[0].transpose(0, 1), atol=5e-3, rtol=5e-3)
