"""Steps of two kinds come in turn: each keeps its place in the workspace, and plans right there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import ArgumentError, NotPlanned
from warploom.runtime.planning.rules import smaller_roles
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies import site, size_classes
from warploom.runtime.strategies.site import LongestFirst, Site
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.roles import RolePrices
from warploom.scheduler.plans.capacity import capacity


def lists(*requests: tuple[int, int]) -> list[torch.Tensor]:
    """qo_indptr and kv_indptr of (rows, keys)."""
    totals = np.append(np.zeros((1, 2), np.int64), np.cumsum(requests, axis=0), axis=0)
    return [torch.from_numpy(np.ascontiguousarray(x).astype(np.int32)) for x in totals.T]


STEPS = [lists(*[(1, 900)] * 6), lists((300, 900), *[(1, 900)] * 5)]


def wrapper() -> wl.AttentionWrapper:
    return wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Ragged(), num_q_heads=4, num_kv_heads=2, head_dim=64,
        dtype="float32", device="cpu",
    )  # fmt: skip


@pytest.fixture
def made_sites(monkeypatch: pytest.MonkeyPatch) -> list[Site]:
    found, make = list[Site](), Site.of

    def noted(*args: Any) -> Site:
        found.append(make(*args))
        return found[-1]

    monkeypatch.setattr(Site, "of", noted)
    return found


def planned_bytes(attention: wl.AttentionWrapper) -> dict[str, bytes]:
    assert attention.planned is not None
    return {name: part.tobytes() for name, part in attention.planned.plan.sections().items()}


def test_steps_in_turn_have_the_plans_of_steps_alone(made_sites: list[Site]) -> None:
    alone = []
    for step in STEPS:
        one = wrapper()
        one.plan(*step)
        assert one.planned is not None and one.planned.is_native
        alone.append((one.tile, planned_bytes(one)))
    assert alone[0][0] != alone[1][0], "the steps have tiles of their own"
    made_sites.clear()
    both = wrapper()
    for turn in range(6):
        both.plan(*STEPS[turn % 2])
        assert (both.tile, planned_bytes(both)) == alone[turn % 2]
    assert len(made_sites) == 2


def test_steps_of_several_sizes_make_no_places_anew(made_sites: list[Site]) -> None:
    """Requests come and go, and the longest one is on either side of a power of two."""
    sizes = [(6, 1020), (6, 1030), (2, 1030), (40, 100), (6, 1020)]
    steps = [lists(*[(1, keys)] * requests) for requests, keys in sizes]
    alone = []
    for step in steps:
        one = wrapper()
        one.plan(*step)
        alone.append(planned_bytes(one))
    made_sites.clear()
    both = wrapper()
    for turn in range(3):
        for step, expected in zip(steps, alone, strict=True):
            both.plan(*step)
            assert planned_bytes(both) == expected, turn
    assert len(made_sites) <= 4


def test_few_places_are_kept(made_sites: list[Site], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_classes, "_KEPT", 1)
    attention = wrapper()
    for turn in range(4):
        attention.plan(*STEPS[turn % 2])
    assert len(made_sites) == 4


def test_an_earlier_batch_is_not_read_from_a_later_plan() -> None:
    attention = wrapper()
    attention.plan(*STEPS[0])
    assert attention.planned is not None
    before = attention.planned
    attention.plan(*STEPS[1])
    with pytest.raises(NotPlanned):
        _ = before.arrays


def test_loads_beyond_what_compiled_planners_count_are_planned_by_numpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load and its CTA share a word there; a bound on all work stands for any CTA's load."""
    rows, lengths = lists((2000, 3000))
    attention, other = wrapper(), wrapper()
    attention.plan(rows, lengths)
    assert attention.planned is not None and attention.planned.by == "the host, natively"
    native = attention.planned.plan
    monkeypatch.setattr(site, "_MOST_LOAD", 100)
    other.plan(rows, lengths)
    assert other.planned is not None and other.planned.by == "NumPy"
    assert not native.problem.stream_k
    assert np.array_equal(other.planned.plan.items, native.items)


def test_the_work_of_vast_bounds_is_no_load_that_planners_count() -> None:
    tile, heads = wl.TileConfig(48, 128), Heads(128, 32)
    sizes: Any = {"rows": 48, "keys": 128, "num_kv_heads": 32, "group_size": 4, "num_ctas": 132}
    for keys, is_in_range in ((2**20, True), (2**28, False)):
        room = capacity(Bounds(4, 2**22, keys), **sizes)
        site = Site.of(wl.Ragged(), heads, tile, room, 132, None, LongestFirst(384, None))
        assert site.is_in_range == is_in_range


def test_the_lines_of_all_bounds_that_have_a_plan_are_counted() -> None:
    """Items have numbers of 31 bits, which leave costs enough of the 62."""
    sizes: Any = {"rows": 16, "keys": 64, "num_kv_heads": 32, "group_size": 4, "num_ctas": 132}
    room = capacity(Bounds(1024, 2**24, 2**28), **sizes)
    assert Site.of(wl.Ragged(), Heads(128, 32), wl.TileConfig(16, 64), room, 132).is_in_range
    with pytest.raises(ArgumentError, match="beyond what int32 counts"):
        capacity(Bounds(1024, 2**25, 2**28), **sizes)


def test_the_prices_of_vast_bounds_are_none_that_planners_of_roles_count() -> None:
    """Of 2^20 rows and 2^24 keys planners that count in 64 bits gave decodes all CTAs but four."""
    tile = wl.TileConfig(128, 128, decode=wl.TileConfig(8, 192))
    prices = RolePrices((1_800_000, 68_267), 70)
    cases = (2**14, 2**17, True), (2**18, 2**20, True), (2**20, 2**24, False)
    for rows, keys, is_in_range in cases:
        room = capacity(
            Bounds(65, rows, keys), rows=128, keys=128, num_kv_heads=8, group_size=8, num_ctas=132,
            smaller=smaller_roles(tile),
        )  # fmt: skip
        site = Site.of(wl.Ragged(), Heads(64, 8), tile, room, 132, prices)
        assert site.is_in_range == is_in_range
