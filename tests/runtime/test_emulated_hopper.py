"""Kernels of the Hopper template, run by fibers on the host: right in every order of their warps.

A few CTAs have many items each, some of them empty, so that all rings turn. Warps lag, copies take
their time, and products read their operands when they are waited for: what is given back too early,
or waited for too late, shows as a wrong number or as threads that all wait.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.emulator import Emulator, compile_for_fibers
from support.hopper_jobs import JOBS, NARROW_JOBS
from support.sampling import few

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.variants.variant import Variant
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch

BATCHES = [  # lengths of queries and of keys
    ((70, 1, 0, 33), (130, 257, 40, 33)),
    ((100,), (700,)),  # few items, whose keys are split
    ((300, 2, 0, 90, 1), (30, 0, 40, 70, 100)),  # queries without a visible key
]
ALONE, PAIR = TileConfig(64, 64, 4, 2, "hopper", 2), TileConfig(128, 64, 8, 2, "hopper", 2)


def check(emulator: Emulator, variant: Variant, setup: Setup, batch: int, order: int) -> None:
    q_lens, kv_lens = BATCHES[batch]
    if isinstance(setup.kv_format, wl.Dense):
        q_lens, kv_lens = (q_lens[0],) * len(q_lens), (kv_lens[0],) * len(kv_lens)
    case = Case(setup, q_lens, kv_lens, num_kv_heads=2, group_size=2, seed=order)
    emulator.order = order
    found = mismatch(variant, case)
    assert found is None, f"order {order}: {case}: {found}"


@pytest.mark.some(3)
@pytest.mark.parametrize("job", range(len(JOBS)))
def test_any_kernel_is_right_in_any_order(emulator: Emulator, job: int) -> None:
    variant, setup = JOBS[job]
    for order, batch in enumerate((0, 2, 1, 2, 0)):
        check(emulator, variant, setup, batch, order + 5 * job if order > 1 else order)


@pytest.mark.some(2)
@pytest.mark.parametrize("job", range(len(NARROW_JOBS)))
def test_8_bit_keys_are_widened_in_any_order(emulator: Emulator, job: int) -> None:
    variant, setup = NARROW_JOBS[job]
    for order, batch in enumerate((0, 2, 1, 2)):
        check(emulator, variant, setup, batch, order + 5 * job if order > 1 else order)


@pytest.mark.some(1)
@pytest.mark.parametrize("tile", [ALONE, PAIR], ids=["one group", "two groups"])
@pytest.mark.parametrize(
    "kv_format", [wl.Ragged(), wl.Paged(24), wl.Paged(1)], ids=["bulk", "parts of blocks", "gather"]
)
def test_empty_items_pass_no_warp_by(
    emulator: Emulator, tile: TileConfig, kv_format: KVFormat
) -> None:
    setup = Setup(kv_format, "bfloat16", tile=tile)
    for seed in range(2, few(12, of=22)):
        check(emulator, wl.Causal(), setup, 2, seed)


_WAITS = """
#include <warploom/hopper/ptx.cuh>
namespace warploom::hopper { char shared_memory[8]; }
extern "C" bool all_come(unsigned order, int arrivals) {
  static warploom::hopper::Barrier barrier;
  warploom::hopper::barrier_init(&barrier, arrivals);
  return fibers::run(1, 64, order, [] {
    if (threadIdx.x % 2 == 0) warploom::hopper::barrier_arrive(&barrier);
    warploom::hopper::barrier_wait(&barrier, 0);
  });
}
"""


def test_threads_that_wait_for_ever_are_found(tmp_path: Path) -> None:
    all_come = compile_for_fibers(_WAITS, tmp_path / "waits.cpp")["all_come"]
    for order in range(5):
        assert all_come(order, 32)
        assert not all_come(order, 33)


class Gap(wl.Variant):
    """Keys of a request are hidden in between: whether a tile is seen is known from tensors."""

    begin = wl.Tensor("int32", ("batch",))
    end = wl.Tensor("int32", ("batch",))

    def logits_mask(self, at: wl.Position) -> Any:
        return (at.kv_pos < self.begin[at.batch]) | (at.kv_pos >= self.end[at.batch])


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "kv_format", [wl.Ragged(), wl.Paged(16), wl.Paged(80)], ids=["ragged", "paged", "pages of 80"]
)
def test_each_lane_finds_the_class_of_another_tile(emulator: Emulator, kv_format: KVFormat) -> None:
    """More than 32 tiles, some of them hidden, of which the items of a split have some."""
    variant, setup = Gap(), Setup(kv_format, "bfloat16", tile=PAIR)
    for seed in range(3):
        for kv_lens in ((2300, 5, 2048), (2049,), (100, 700)):
            q_lens = (70, 3, 1)[: len(kv_lens)]
            case = Case(setup, q_lens, kv_lens, num_kv_heads=2, seed=seed)
            emulator.order = seed
            assert mismatch(variant, case) is None
