"""Benchmarks over several processes run, small and over gloo, and what was found of prefetches."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from warploom.prefetch import H100_NCCL_OVERLAP, H100_OVERLAP

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch has no distributed part"
)


def rows_of(benchmark: str, folder: Path) -> list[dict[str, Any]]:
    import_module(benchmark).main(["--tiny", "--out", str(folder)])
    lines = (folder / f"{benchmark}_2.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def test_a_decoder_with_prefetches(harness: ModuleType, tmp_path: Path) -> None:
    rows = rows_of("tensor_parallel", tmp_path)
    assert [row["impl"] for row in rows] == [
        "an all-reduce alone", "none", "2 MB", "4 MB", "8 MB", "16 MB", "24 MB", "stand-in's choice"
    ]  # fmt: skip
    assert all(row["value"] > 0 for row in rows)  # and none had other bits
    assert rows[2]["params"]["budget_mlp"] == 2_000_000


def test_attention_on_two_ranks_and_on_one(harness: ModuleType, tmp_path: Path) -> None:
    rows = rows_of("context_parallel", tmp_path)
    found = {(row["case"].split()[0], row["impl"]): row for row in rows}
    assert set(found) == {
        ("decode", "1 GPU"), ("decode", "2 GPUs, all heads"), ("decode", "2 GPUs, own heads"),
        ("prefill", "1 GPU"), ("prefill", "2 GPUs, ring"), ("prefill", "2 GPUs, all_gather"),
    }  # fmt: skip
    for (_, impl), row in found.items():
        assert row["value"] > 0 and row["samples"] == 3 and row["error"] < 1e-4
        assert ("predicted_us" in row["params"]) == (impl != "1 GPU")


class _Alone:
    """One rank beside another that has found these numbers."""

    world = 2

    def __init__(self, others: float) -> None:
        self._others = others

    def most(self, values: list[float]) -> list[float]:
        return [max(x, self._others) for x in values]


def test_the_error_is_that_of_all_ranks(harness: ModuleType) -> None:
    benchmark, same = import_module("context_parallel"), torch.ones(3)
    assert benchmark.error(_Alone(0.01), same, same) == 0.01
    assert benchmark.error(_Alone(1.0), same, same) is None


def test_steps_beside_a_wrong_one_say_nothing_of_costs(harness: ModuleType) -> None:
    benchmark = import_module("tensor_parallel")
    _, rows = harness.load_rows(harness.RESULTS / "tensor_parallel_2.jsonl")
    case = rows[0].case
    wrong = [replace(x, value=None) if (x.case, x.impl) == (case, "none") else x for x in rows]
    costs = benchmark.fixed_costs(wrong, 2, H100_OVERLAP)
    assert costs == benchmark.fixed_costs([x for x in rows if x.case != case], 2, H100_OVERLAP)


def test_the_recorded_cost_is_that_of_the_rows(harness: ModuleType) -> None:
    """Beside NCCL's all-reduces: more than a prefetch can save, so that none is chosen."""
    benchmark, costs = import_module("tensor_parallel"), []
    for world in (2, 4):
        _, rows = harness.load_rows(harness.RESULTS / f"tensor_parallel_{world}.jsonl")
        costs += benchmark.fixed_costs(rows, world, H100_OVERLAP)
    assert len(costs) == 40
    assert statistics.median(costs) == pytest.approx(H100_NCCL_OVERLAP.fixed, rel=1e-3)
    off = statistics.pstdev(costs, statistics.median(costs))
    assert off == pytest.approx(H100_NCCL_OVERLAP.error, rel=1e-3)
    for seconds in (10e-6, 40e-6, 1e-3):
        assert H100_NCCL_OVERLAP.best_bytes(seconds, 400e6, 8) == 0
