"""The tile of a composed plan is the fastest that the recorded sweep has, or nearly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warploom as wl
from warploom.codegen.choice.composed_cost import Reading, cheapest_composed_tile, composed_tiles
from warploom.codegen.compilers.arch import arch_named
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.scheduler.composed.planning import SharedBatch
from warploom.scheduler.composed.prefixes import find_prefixes
from warploom.scheduler.model.layout import SEGMENT

SWEEP = Path(__file__).resolve().parents[2] / "benchmarks/results/composed_tiles.jsonl"
ROWS = [json.loads(line) for line in SWEEP.read_text().splitlines()[1:]]
CASES = list(dict.fromkeys(row["case"] for row in ROWS))
HOPPER, SMS, PAGE = arch_named("sm_90a"), 132, 16


def reads(params: dict[str, Any], rows: int) -> tuple[int, int, int]:
    """Counts of requests with one query row, a common prefix and pages of their own behind it."""
    batch, shared, own = params["batch"], params["prefix"] // PAGE, params["suffix"] // PAGE
    pages = [[*range(shared), *range(shared + i * own, shared + (i + 1) * own)]
             for i in range(batch)]  # fmt: skip
    segments = np.zeros(batch, SEGMENT.dtype)
    segments["num_q"] = segments["q_len"] = 1
    segments["kv_len"] = segments["kv_count"] = (shared + own) * PAGE
    segments["batch"] = segments["q_row"] = np.arange(batch)
    segments["index_begin"] = np.arange(batch) * (shared + own)
    full = np.full(batch, shared + own)
    indices = np.concatenate(pages).astype(np.int32)
    forest = find_prefixes(segments["index_begin"].astype(np.int64), indices, full, PAGE)
    group = params["q_heads"] // params["kv_heads"]
    return SharedBatch(segments, forest, group, PAGE, levels=2).reads(rows)


def spec_of(variant: wl.Variant, dim: int) -> AttentionSpec:
    return AttentionSpec(trace(variant), dim, dim, dtype("bfloat16"), wl.Composed(PAGE))


def test_keys_are_counted_once_and_walked_for_each_tile() -> None:
    params = {"batch": 64, "prefix": 1024, "suffix": 128, "q_heads": 32, "kv_heads": 8}
    assert reads(params, 16) == (1024 + 64 * 128, 16 * 1024 + 64 * 128, 16 + 64)
    assert reads(params, 128) == (1024 + 64 * 128, 2 * 1024 + 64 * 128, 2 + 64)


@pytest.mark.parametrize("case", CASES)
def test_choices_are_near_the_best_and_no_slower_than_the_single_format(case: str) -> None:
    times = {row["impl"]: row["value"] for row in ROWS if row["case"] == case}
    params = next(row["params"] for row in ROWS if row["case"] == case)
    heads = params["kv_heads"]
    spec = spec_of(wl.Causal(), 128)
    choice = cheapest_composed_tile(
        spec,
        HOPPER,
        composed_tiles(spec, HOPPER),
        lambda rows: Reading(*(heads * count / SMS for count in reads(params, rows))),
    )
    single = times.pop("single format")
    assert times[choice.tile.label] <= 1.03 * min(times.values())
    assert times[choice.tile.label] <= 1.01 * single
    assert choice.costs[0][0] == choice.tile.label
    assert choice.costs[0][1] == pytest.approx(times[choice.tile.label], rel=0.15)


def test_there_is_no_model_for_what_the_sweep_had_not() -> None:
    assert len(composed_tiles(spec_of(wl.Causal(), 128), HOPPER)) == 3
    assert not composed_tiles(spec_of(wl.Causal(), 256), HOPPER)
    assert not composed_tiles(spec_of(wl.Rope(), 128), HOPPER)
    assert not composed_tiles(spec_of(wl.Causal(), 128), arch_named("sm_80"))
