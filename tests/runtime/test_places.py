"""Steps of two kinds come in turn: each keeps its place in the workspace, and plans right there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import NotPlanned
from warploom.runtime.planning import places
from warploom.runtime.planning.places import Site


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


def test_few_places_are_kept(made_sites: list[Site], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_KEPT", 1)
    attention = wrapper()
    for turn in range(4):
        attention.plan(*STEPS[turn % 2])
    assert len(made_sites) == 4


def test_an_earlier_batch_is_not_read_from_a_later_plan() -> None:
    attention = wrapper()
    attention.plan(*STEPS[0])
    assert attention.planned is not None
    before = attention.planned.batch
    attention.plan(*STEPS[1])
    with pytest.raises(NotPlanned):
        _ = before.segments
