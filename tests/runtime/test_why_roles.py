"""`explain()` says why a batch that could be mixed has two roles, or one tile (decision 0056)."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
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
    planned: Any = SimpleNamespace(batch=batch)
    return why_roles(made.rules, planned, values)


def test_the_times_of_both_ways_are_told_where_they_decide(planner: MakePlanner) -> None:
    made = planner(declared(kv_format=wl.Ragged()), HOPPER, 132)[0]
    faster, slower = (why(made, of_lengths(q)) for q in ([900, *MANY], [4000, 4000, 1]))
    assert faster is not None and faster.startswith("yes, decodes by portable 8x")
    assert slower is not None and slower.startswith("no, decodes by portable 8x")
    for told in (faster, slower):
        for line in told.splitlines():  # a tile of 8 rows, and one of 16
            at_once, in_turn = (float(x) for x in re.findall(r"\d+\.\d", line))
            assert line.startswith("yes") == (in_turn - at_once >= 3 + in_turn / 25)
    assert len(faster.splitlines()) == 2


def test_batches_that_are_not_mixed_need_no_reason(planner: MakePlanner) -> None:
    made = planner(declared(kv_format=wl.Ragged()), HOPPER, 132)[0]
    for q in (MANY, [900], []):
        assert why(made, of_lengths(q)) is None


@pytest.mark.parametrize(
    ("given", "arch", "reason"),
    [
        ({}, "sm_80", "those of sm_80 are not measured"),
        ({"head_dim": 64}, "sm_90a", "heads of other than 128 lanes"),
        ({"kv_dtype": "float8_e4m3fn"}, "sm_90a", "no 8-bit keys"),
        ({"variant": wl.Causal() & wl.Rope()}, "sm_90a", "key_transform would run"),
        ({"batch_invariant": True}, "sm_90a", "one kernel serves all batches"),
        ({"bounds": replace(BOUNDS, max_q_rows=41)}, "sm_90a", "no more rows than requests"),
        ({"bounds": BOUNDS, "cuda_graph": True}, "sm_90a", "leave room for prefills"),
    ],
)
def test_what_forbids_them_is_named(
    planner: MakePlanner, given: dict[str, Any], arch: str, reason: str
) -> None:
    made = planner(declared(kv_format=wl.Ragged(), **given), ARCHS[arch], 132)[0]
    told = why(made, of_lengths([900, *MANY]))
    assert told is not None and reason in told
    assert told.startswith("for all" if "cuda_graph" in given else "no: ")


def test_lengths_on_the_device_and_a_setting_forbid_them(
    planner: MakePlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = declared(kv_format=wl.Ragged(), bounds=BOUNDS)
    sizes = of_lengths([900, *MANY]).sizes
    unread = OnDevice(940, 40_000, sizes, (), BOUNDS)
    told = why(planner(of, HOPPER, 132)[0], unread)
    assert told is not None and "lie on the device" in told
    monkeypatch.setenv("WARPLOOM_MIXED_ROLES", "0")
    told = why(planner(of, HOPPER, 132)[0], of_lengths([900, *MANY]))
    assert told is not None and "WARPLOOM_MIXED_ROLES=0" in told


def test_shared_prefixes_of_wide_groups_have_one_tile(planner: MakePlanner) -> None:
    made = planner(declared(kv_format=wl.Composed(16), num_q_heads=32), HOPPER, 132)[0]
    told = made.rules.obstacle_to_roles
    assert told is not None and "groups of 16 heads" in told
