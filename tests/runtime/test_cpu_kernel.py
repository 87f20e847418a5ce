"""The CPU kernel against the float64 oracle: types, sizes, formats, hooks, splits.

To show that nothing is read or written out of bounds, run this file on instrumented kernels, with
`address` and with `undefined` for SANITIZER:

    CXX="env -u LD_PRELOAD g++ -fsanitize=SANITIZER -fno-sanitize-recover=all" \\
    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \\
    ASAN_OPTIONS=detect_leaks=0 pytest tests/runtime/test_cpu_kernel.py
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from warploom.codegen.source import TileConfig
from warploom.dsl.library.alibi import Alibi
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.flash_sigmoid import FlashSigmoid
from warploom.dsl.library.qk_norm import QKNorm
from warploom.dsl.library.rope import Rope
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.types.formats import BlockSparse, Dense, KVFormat, Paged, Ragged
from warploom.dsl.values.functions import exp, max, mean, rsqrt
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.variant import Variant

pytestmark = pytest.mark.optimised

Run = Callable[..., Any]

# Requests of one row, of many, of none, with fewer keys than queries, and with no keys.
Q_LENS = (1, 70, 0, 9, 5)
KV_LENS = (130, 150, 20, 4, 0)


class Full(Variant):
    """No mask and no transform."""


class DequantizedOutputGate(Variant):
    """Every vector hook that the library leaves alone, each reading its position."""

    softmax = True
    value_scale = Tensor("float32", ("kv_head", "kv_pos"))
    gate = Scalar("float32", default=0.25)

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * self.value_scale[at.kv_head, at.kv_pos] + at.lane * 0.01

    def output_transform(self, o: Value, at: Position) -> Value:
        scaled = o * rsqrt(mean(o * o) + 1.0) / (1.0 + exp(-at.lse))
        return scaled + self.gate * max(o) * (at.q_head + at.q_pos % 3)


class NeverVisible(Variant):
    def logits_mask(self, at: Position) -> Value:
        return at.kv_pos < -1


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        ("float32", (64, 64)),
        ("bfloat16", (64, 64)),
        ("float16", (64, 64)),
        ("bfloat16", (8, 8)),
        ("float32", (40, 40)),
        ("bfloat16", (72, 40)),
        ("float16", (128, 128)),
        ("bfloat16", (192, 128)),
        ("float32", (256, 256)),
    ],
)
def test_types_and_head_dims(cpu_run: Run, dtype: str, dims: tuple[int, int]) -> None:
    run = cpu_run(Causal(), Q_LENS, KV_LENS, dtype=dtype, head_dim=dims[0], head_dim_v=dims[1])
    run.check(run.launch())


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "kv_format",
    [
        Paged(1),
        Paged(3),
        Paged(16),
        Paged(16, layout="HND"),
        BlockSparse((1, 1)),
        BlockSparse((3, 5)),
        BlockSparse((16, 8)),
    ],
    ids=str,
)
def test_formats(cpu_run: Run, kv_format: KVFormat) -> None:
    run = cpu_run(Causal(), Q_LENS, KV_LENS, kv_format=kv_format)
    run.check(run.launch())


def test_dense_storage_with_a_batch_axis(cpu_run: Run) -> None:
    run = cpu_run(Causal(), (30, 30, 30), (30, 77, 200), kv_format=Dense(), dtype="float32")
    run.check(run.launch())


def test_block_sparse_without_a_mask_hides_columns_past_the_end(cpu_run: Run) -> None:
    run = cpu_run(Full(), (17, 40), (61, 100), kv_format=BlockSparse((8, 16)), dtype="float32")
    run.check(run.launch())


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (6, 2), (16, 1), (5, 5)])
@pytest.mark.parametrize("q_len", [1, 3])
def test_groups_and_decoding(cpu_run: Run, num_q_heads: int, num_kv_heads: int, q_len: int) -> None:
    lens = ((q_len,) * 3, (1 + q_len, 64, 257))
    run = cpu_run(Causal(), *lens, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)
    run.check(run.launch())


class ByWidth(Variant):
    """A scale of values that reads the number of lanes."""

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * (at.head_dim * 0.25)


VARIANTS = [
    ByWidth(),
    Full(),
    Causal() & SoftCap(3.0),
    SlidingWindow(20, 5, sinks=2),
    Causal() & Alibi(),
    Alibi(np.linspace(0.1, 0.9, 4)),
    FlashSigmoid(1.5, -2.0),
    Causal() & FlashSigmoid(1.0, -1.0),
    Causal() & Rope(),
    Rope(theta=500.0, interleaved=True, dim=32),
    QKNorm(np.linspace(0.5, 2, 64), np.linspace(1, 3, 64)) & Rope(),
    DequantizedOutputGate(value_scale=np.linspace(0.5, 2.0, 2 * 200).reshape(2, 200)),
]


@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("variant", "dtype"),
    list(zip(VARIANTS, cycle(["float32", "bfloat16"]))),
    ids=lambda value: value.name if isinstance(value, Variant) else value,
)
def test_variants(cpu_run: Run, variant: Variant, dtype: str) -> None:
    run = cpu_run(variant, Q_LENS, KV_LENS, dtype=dtype)
    run.check(run.launch())


def test_rows_that_see_nothing(cpu_run: Run) -> None:
    # the first six queries of the first request precede every key
    run = cpu_run(Causal(), (8, 2, 1), (2, 0, 3), dtype="float32")
    outcome = run.launch()
    run.check(outcome)
    assert np.isneginf(outcome.lse[0][:6]).all() and not outcome.o[0][:6].any()
    assert np.isneginf(outcome.lse[1]).all() and not outcome.o[1].any()
    never = cpu_run(NeverVisible(), (3,), (500,), num_ctas=4, split_size=64)
    never.check(never.launch())


@pytest.mark.parametrize("variant", [Causal(), FlashSigmoid(1.0, -3.0)], ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_splits_merge_in_a_fixed_order(cpu_run: Run, variant: Variant, dtype: str) -> None:
    lens = ((1, 40, 3), (900, 400, 1300))
    for num_ctas, split_size in ((1, None), (7, None), (16, None), (3, 128)):
        run = cpu_run(variant, *lens, dtype=dtype, num_ctas=num_ctas, split_size=split_size)
        assert (run.plan.num_slots > 0) == (num_ctas > 1)
        first = run.launch()
        run.check(first)
        for threads in (1, 2, 5):
            again = run.launch(threads)
            assert (again.raw == first.raw).all()


def test_fixed_split_sizes_make_results_independent_of_the_batch(cpu_run: Run) -> None:
    def last_request(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], ctas: int) -> Any:
        run = cpu_run(Causal(), q_lens, kv_lens, num_ctas=ctas, split_size=128, seed=5)
        # the same request, whatever came before it
        rng = np.random.default_rng(9)
        for x in (run.q, run.keys[-1], run.values[-1]):
            part = x[-q_lens[-1] :] if x is run.q else x
            part.copy_(part.new_tensor(rng.standard_normal(part.shape)))
        return run.launch().o[-1]

    alone = last_request((33,), (700,), 1)
    among = last_request((5, 64, 33), (90, 300, 700), 6)
    assert (alone == among).all()


def test_tiles_of_other_sizes(cpu_run: Run) -> None:
    for rows, keys in ((1, 128), (7, 64), (100, 256)):
        run = cpu_run(Causal(), Q_LENS, KV_LENS, tile=TileConfig(rows, keys, 1, 1))
        run.check(run.launch())


def test_log_sum_exp_may_be_absent(cpu_run: Run) -> None:
    run = cpu_run(Causal(), (4,), (9,), kv_format=Ragged())
    wanted = run.launch().o[0]
    pointers = [x.data_ptr() for x in (run.q, *run.stored, run.o)]
    run.lse.fill_(3.0)
    run.params.set_pointers(*pointers, 0)
    assert (run.launch().o[0] == wanted).all()
    assert (run.lse == 3.0).all()
