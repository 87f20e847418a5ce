"""Prefill and decode in one launch of the Hopper template, run by fibers on the host."""

from __future__ import annotations

import pytest
from support.emulator import Emulator

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.variants.variant import Variant
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch

TILE = TileConfig(64, 64, 4, 2, "hopper", 2, decode=TileConfig(16, 64, 2, 2))
TALL = TileConfig(128, 64, 8, 2, "hopper", 1, decode=TileConfig(16, 96, 3, 2))
JOBS: list[tuple[Variant, KVFormat, str, int, TileConfig]] = [
    (wl.Causal(), wl.Paged(16), "bfloat16", 64, TILE),
    (wl.Causal(), wl.Ragged(), "float16", 128, TALL),
    (wl.Causal() & wl.SoftCap(5.0), wl.Paged(1), "bfloat16", 64, TILE),
    (wl.Causal() & wl.Alibi(), wl.Paged(16), "bfloat16", 64, TALL),
    (wl.Causal() & wl.SlidingWindow(40), wl.Ragged(), "bfloat16", 96, TALL),
    (wl.Alibi() & wl.FlashSigmoid(bias=-2.0), wl.Paged(3), "float16", 64, TILE),
]


def check(emulator: Emulator, job: int, q_lens: list[int], kv_lens: list[int], order: int) -> None:
    variant, kv_format, dtype, dim, tile = JOBS[job]
    case = Case(
        Setup(kv_format, dtype, dim, dim, tile=tile),
        tuple(q_lens), tuple(kv_lens), num_kv_heads=2, group_size=4, seed=order,
    )  # fmt: skip
    emulator.order = order
    found = mismatch(variant, case)
    assert found is None, f"order {order}: {case}: {found}"


@pytest.mark.parametrize("job", range(len(JOBS)))
def test_mixes_are_right(emulator: Emulator, job: int) -> None:
    for order, (q_lens, kv_lens) in enumerate([
        ([70, 1, 0, 33, 1, 2], [130, 257, 40, 33, 500, 64]),
        ([1, 4, 1], [300, 40, 0]),  # decodes alone
        ([100, 60], [200, 60]),  # prefill alone
        ([1, 90, 1, 1], [64, 700, 32, 1000]),
    ]):  # fmt: skip
        check(emulator, job, q_lens, kv_lens, order + 7 * job)
