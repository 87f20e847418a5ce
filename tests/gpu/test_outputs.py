"""What kernels record on a GPU, from every template, and inside captured graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.recorded_variants import ROWS, VARIANTS, Dump

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.errors import WrongDevice
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.testing import warm_up

pytestmark = pytest.mark.gpu

HOPPER, GROUPS = TileConfig(128, 128, 8, 2, "hopper", 2), TileConfig(128, 64, 8, 2, "hopper", 1)
ONE_GROUP, STREAMED = TileConfig(64, 128, 4, 2, "hopper", 2), TileConfig(16, 64, 4, 3)
TALL, TWO_BLOCKS, ONE_ROW = (
    TileConfig(64, 64, 4, 2), TileConfig(128, 64, 4, 2), TileConfig(1, 64, 4, 1)
)  # fmt: skip


def on_gpu(kv_format: KVFormat, dtype: str, dim: int, tile: TileConfig) -> Setup:
    return Setup(kv_format, dtype, dim, dim, "cuda", tile)


JOBS = [
    ("two parts", on_gpu(wl.Ragged(), "float16", 128, HOPPER)),
    ("before a bias", on_gpu(wl.Paged(16), "bfloat16", 256, GROUPS)),
    ("open part", on_gpu(wl.Paged(1), "bfloat16", 64, ONE_GROUP)),
    ("no softmax", on_gpu(wl.Ragged(), "bfloat16", 128, HOPPER)),
    ("transformed", on_gpu(wl.Ragged(), "bfloat16", 128, HOPPER)),
    ("behind a bias", on_gpu(wl.Paged(16), "float16", 128, STREAMED)),
    ("before a cap", on_gpu(wl.Composed(4), "bfloat16", 64, STREAMED)),
    ("documents", on_gpu(wl.Ragged(), "bfloat16", 64, TALL)),
    ("two terms", on_gpu(wl.Dense(), "float16", 64, TWO_BLOCKS)),
    ("behind a cap", on_gpu(wl.Paged(16), "bfloat16", 128, ONE_ROW)),
    ("rows", on_gpu(wl.BlockSparse(block=(64, 16)), "float16", 64, TALL)),
]
ALL = {**VARIANTS, "rows": ROWS}


@pytest.fixture(scope="module")
def _kernels() -> None:
    warm_up([(ALL[name], setup) for name, setup in JOBS])


@pytest.mark.usefixtures("cuda", "_kernels")
@pytest.mark.parametrize(("name", "setup"), JOBS, ids=[f"{name}, {x}" for name, x in JOBS])
def test_each_kernel_records_as_the_oracle_does(name: str, setup: Setup) -> None:
    batches = [((70, 1, 0, 33), (130, 257, 40, 33)), ((1,) * 5, (70, 1, 900, 0, 66))]
    if isinstance(setup.kv_format, wl.Dense):
        batches = [((40, 40), (130, 130))]
    for q_lens, kv_lens in batches:
        for heads, group in ((2, 1), (2, 4)):
            case = Case(setup, q_lens, kv_lens, heads, group, scale=2.0, seed=7)
            found = mismatch(ALL[name], case)
            assert found is None, f"{name} {case}: {found}"


def test_replays_write_to_the_output_that_was_captured(cuda: Any) -> None:
    q = torch.randn(1, 100, 4, 64, device=cuda).bfloat16()
    k, v = torch.randn(2, 1, 100, 2, 64, device=cuda).bfloat16()
    seen, variant = torch.zeros(1, 4, 100, 100, device=cuda), wl.Causal() & Dump()
    wl.attention(q, k, v, variant=variant, seen=seen)
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        wl.attention(q, k, v, variant=variant, seen=seen)
    for _ in range(3):
        q.normal_()
        seen.fill_(torch.nan)
        graph.replay()
        wide = k.repeat_interleave(2, 2)
        expected = torch.einsum("bqhd,bkhd->bhqk", q.double(), wide.double()) / 8
        hidden = ~torch.ones(100, 100, dtype=torch.bool, device=cuda).tril()
        expected = expected.masked_fill(hidden, torch.nan).float()
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_outputs_are_never_copied_to_the_device(cuda: Any) -> None:
    q, k, v = torch.randn(3, 1, 9, 2, 64, device=cuda).bfloat16()
    with pytest.raises(WrongDevice, match="seen"):
        wl.attention(q, k, v, variant=Dump(), seen=torch.zeros(1, 2, 9, 9))
    with pytest.raises(WrongDevice, match="seen"):
        wl.attention(q, k, v, variant=Dump(seen=torch.zeros(1, 2, 9, 9)))
