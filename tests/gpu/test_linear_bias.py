"""Biases that grow from key to key on a GPU, in every kernel that leaves them to its softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.linear_biases import INPUTS, VARIANTS

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.testing import warm_up

pytestmark = pytest.mark.gpu

HOPPER, WIDE = TileConfig(128, 128, 8, 2, "hopper", 2), TileConfig(128, 64, 8, 2, "hopper", 1)
ONE_GROUP = TileConfig(64, 128, 4, 2, "hopper", 2)
STREAMED, TALL = TileConfig(16, 64, 4, 3), TileConfig(64, 64, 4, 2)
TWO_BLOCKS, ONE_ROW = TileConfig(128, 64, 4, 2), TileConfig(1, 64, 4, 1)
NARROW = TileConfig(16, 128, 4, 2)


def on_gpu(
    kv_format: KVFormat,
    dtype: str,
    dim: int,
    tile: TileConfig | None = None,
    kv_dtype: str | None = None,
) -> Setup:
    return Setup(kv_format, dtype, dim, dim, "cuda", tile, kv_dtype)


ALL = tuple(VARIANTS)
JOBS = [
    (on_gpu(wl.Ragged(), "float16", 128, HOPPER), ALL),
    (on_gpu(wl.Paged(1), "bfloat16", 64, ONE_GROUP), ("alibi", "any slopes", "documents")),
    (on_gpu(wl.Paged(16), "bfloat16", 256, WIDE), ("alibi", "any slopes", "window")),
    (on_gpu(wl.Paged(16), "float16", 128, STREAMED), ALL[:4] + ALL[-2:]),
    (on_gpu(wl.Ragged(), "bfloat16", 64, TALL), ("alibi", "any slopes", "after a cap")),
    (on_gpu(wl.Paged(16), "float16", 64, TWO_BLOCKS), ("decay", "any slopes", "both ways")),
    (on_gpu(wl.Ragged(), "bfloat16", 128, ONE_ROW), ("decay", "any slopes")),
    (on_gpu(wl.Paged(16), "bfloat16", 64, NARROW, "float8_e4m3fn"), ("alibi", "any slopes")),
    (on_gpu(wl.BlockSparse(block=(32, 16)), "float16", 64, TALL), ("alibi", "any slopes")),
]


@pytest.fixture(scope="module")
def _kernels() -> None:
    warm_up([(VARIANTS[name], setup) for setup, names in JOBS for name in names])


@pytest.mark.usefixtures("cuda", "_kernels")
@pytest.mark.parametrize(("setup", "names"), JOBS, ids=[str(setup) for setup, _ in JOBS])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "num_kv_heads", "group_size"),
    [((70, 1, 0, 33), (130, 257, 40, 33), 2, 2), ((300, 3), (300, 1200), 1, 8)],
)
def test_each_kernel_agrees_with_the_oracle(
    setup: Setup,
    names: tuple[str, ...],
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    num_kv_heads: int,
    group_size: int,
) -> None:
    for name in names:
        case = Case(setup, q_lens, kv_lens, num_kv_heads, group_size, scale=2.0, seed=7)
        found = mismatch(VARIANTS[name], case, INPUTS.get(name))
        assert found is None, f"{name} {case}: {found}"


FAR = [
    ("alibi", on_gpu(wl.Paged(16), "bfloat16", 64), (1, 4), 8),
    ("alibi", on_gpu(wl.Ragged(), "float16", 64, TALL), (3, 70), 1),
    ("decay", on_gpu(wl.Ragged(), "float16", 128), (150, 2), 4),
    ("backwards", on_gpu(wl.Ragged(), "float16", 128), (150, 2), 1),
    ("any slopes", on_gpu(wl.Paged(16), "bfloat16", 128), (20, 1), 8),
]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("name", "setup", "q_lens", "group_size"), FAR)
def test_few_queries_far_from_their_first_keys(
    name: str, setup: Setup, q_lens: tuple[int, ...], group_size: int
) -> None:
    """Keys are split, and partial results are merged that biases set far apart."""
    case = Case(setup, q_lens, (100_000, 30_011), 1, group_size, seed=11)
    found = mismatch(VARIANTS[name], case, INPUTS.get(name))
    assert found is None, f"{name} {case}: {found}"


@pytest.mark.parametrize("tile", [None, HOPPER, TWO_BLOCKS, STREAMED], ids=str)
def test_a_row_has_the_bits_of_its_own_slope(tile: TileConfig | None, cuda: Any) -> None:
    """Beside steep rows and gentle ones: groups of three heads lie elsewhere in each chunk."""
    slopes = torch.tensor([20.0, 0.37, 0.21, 0.13, 20.0, 0.41], device=cuda)
    attention = wl.AttentionWrapper(
        wl.Causal() & wl.Alibi(slopes=slopes), num_q_heads=6, num_kv_heads=2, head_dim=128,
        dtype="bfloat16", device=cuda, tile=tile, batch_invariant=True,
    )  # fmt: skip
    q = torch.randn(9, 6, 128, device=cuda, dtype=torch.bfloat16)
    k, v = torch.randn(2, 300, 2, 128, device=cuda, dtype=torch.bfloat16)
    attention.plan([0, 9], [0, 300])
    among, among_sums = attention.run(q, (k, v), return_lse=True)
    for rows in (1, 2, 5):
        attention.plan([0, rows], [0, 300])
        out, sums = attention.run(q[-rows:], (k, v), return_lse=True)
        assert torch.equal(out, among[-rows:])
        assert torch.equal(sums, among_sums[-rows:])
