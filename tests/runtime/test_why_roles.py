"""`explain()` says why a batch that could be mixed has two roles, or one tile (decision 0056)."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gpu_planners import CAUSAL, MakePlanner, declared, of_lengths, planners

import warploom as wl
from warploom.codegen.compilers.arch import ARCHS
from warploom.runtime.formats.batch import Batch, OnDevice
from warploom.runtime.strategies.planner import Planner
from warploom.runtime.wrappers.why_roles import why_roles

MANY = [1] * 40
HOPPER = ARCHS["sm_90a"]
BOUNDS = wl.Bounds(max_requests=41, max_q_rows=940, max_kv_len=40_000)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> MakePlanner:
    return planners(monkeypatch)


def why(made: Planner, batch: Batch) -> str | None:
    values: Any = SimpleNamespace(scalars=CAUSAL.inputs(), known={})
    planned: Any = SimpleNamespace(batch=batch, choice=made.choice(batch, values))
    return why_roles(made.rules, planned, values)


def test_the_times_of_both_ways_are_told_where_they_decide(planner: MakePlanner) -> None:
    made = planner(declared(kv_format=wl.Ragged()), HOPPER, 132)[0]
    faster, slower = (why(made, of_lengths(q)) for q in ([900, *MANY], [4000, 4000, 1]))
    assert faster is not None and slower is not None
    at = "at the prices of an H200; decodes"
    assert faster.startswith(f"yes, {at} by portable 8x") and slower.startswith(f"no, {at}")
    for told, is_faster in ((faster, True), (slower, False)):
        lines = told.split("; ")[1:]
        assert len(lines) == 2  # a tile of 8 rows, and one of 16
        times = [[float(x) for x in re.findall(r"\d+\.\d", line)] for line in lines]
        pays = [in_turn - at_once >= 3 + in_turn / 25 for at_once, in_turn in times]
        chosen = [line.endswith("which was chosen") for line in lines]
        assert any(pays) == is_faster and chosen == [is_faster, False]


def test_batches_that_are_not_mixed_need_no_reason(planner: MakePlanner) -> None:
    made = planner(declared(kv_format=wl.Ragged()), HOPPER, 132)[0]
    for q in (MANY, [900], []):
        assert why(made, of_lengths(q)) is None


@pytest.mark.parametrize(
    ("given", "arch", "reason"),
    [
        ({}, "sm_80", "two roles are not measured on sm_80"),
        ({"head_dim": 80}, "sm_90a", "heads of other lanes than 64, 96, 128"),
        ({"variant": wl.TokenKVScale(), "kv_dtype": "int8"}, "sm_90a", "value_transform would run"),
        ({"variant": wl.Causal() & wl.Rope()}, "sm_90a", "key_transform would run"),
        ({"batch_invariant": True}, "sm_90a", "batch_invariant=True wants one kernel"),
        ({"bounds": replace(BOUNDS, max_q_rows=41)}, "sm_90a", "taken for decodes alone"),
        ({"bounds": BOUNDS, "cuda_graph": True}, "sm_90a", "leave room for prefills"),
        ({"bounds": replace(BOUNDS, max_q_rows=120), "cuda_graph": True}, "sm_90a", "few prefills"),
        ({"num_q_heads": 48}, "sm_90a", "a decode has 24 rows"),
    ],
)
def test_what_forbids_them_is_named(
    planner: MakePlanner, given: dict[str, Any], arch: str, reason: str
) -> None:
    made = planner(declared(kv_format=wl.Ragged(), **given), ARCHS[arch], 132)[0]
    told = why(made, of_lengths([900, *MANY]))
    assert told is not None and reason in told
    assert told.startswith("for all" if reason == "leave room for prefills" else "no: ")


def test_lengths_on_the_device_and_a_setting_forbid_them(
    planner: MakePlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = declared(kv_format=wl.Ragged(), bounds=BOUNDS)
    made = planner(of, HOPPER, 132)[0]
    for requests in (41, 3):  # as many as bounds have, and fewer
        ends = torch.zeros(requests + 1, dtype=torch.int32)
        unread = OnDevice.of((ends, ends, None, None), requests, 940, BOUNDS)
        told = why(made, unread)
        assert told is not None and "lie on the device" in told
    monkeypatch.setenv("WARPLOOM_MIXED_ROLES", "0")
    told = why(planner(of, HOPPER, 132)[0], of_lengths([900, *MANY]))
    assert told is not None and "WARPLOOM_MIXED_ROLES=0" in told


def test_shared_prefixes_of_wide_groups_have_one_tile(planner: MakePlanner) -> None:
    made = planner(declared(kv_format=wl.Composed(16), num_q_heads=32), HOPPER, 132)[0]
    told = made.rules.obstacle_to_roles
    assert told is not None and "a decode has 16 rows" in told
