"""Prices are held against recorded splits, and a model of times finds the numbers of made ones."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from warploom.codegen.choice.role_cost import RoleCost
from warploom.scheduler.model.roles import Role


@pytest.fixture
def role_splits(harness: ModuleType) -> ModuleType:
    return __import__("role_splits")


@pytest.fixture
def role_times(harness: ModuleType) -> ModuleType:
    return __import__("role_times")


@pytest.fixture
def recorded(harness: ModuleType, role_splits: ModuleType) -> Any:
    return role_splits.load(harness.RESULTS / "role_splits.jsonl")


def test_prices_of_a_grid_choose_no_better(role_splits: ModuleType, recorded: Any) -> None:
    """The figures of docs/mixed-batches.md."""
    first, other = role_splits.halves_of(recorded)
    assert (len(first), len(other)) == (56, 56)
    shipped = role_splits.Prices()
    losses = [round(role_splits.mean_loss(half, shipped), 3) for half in (first, other)]
    assert losses == [1.01, 1.013]
    for prices in role_splits.GRID:
        assert role_splits.mean_loss(first, prices) >= role_splits.mean_loss(first, shipped)
        assert role_splits.mean_loss(other, prices) >= role_splits.mean_loss(other, shipped) - 1e-3


def test_wrong_prices_choose_worse(role_splits: ModuleType, recorded: Any) -> None:
    for wrong in (role_splits.Prices(decode=0.6), role_splits.Prices(prefill=2.0)):
        assert role_splits.mean_loss(recorded, wrong) > 1.1


def test_a_split_between_two_that_were_run_takes_a_time_between(role_splits: ModuleType) -> None:
    cost = RoleCost(prefill=1_000_000, decode=1_000_000, saturating=66)
    roles = Role("prefill", 48, 128), Role("decode", 12, 64)  # of 8 units a tile, and of 16
    tiles, work = (100, 100), (800, 1600)
    ms = (2.0, 1.0, 4.0)
    one = role_splits.Timed("", cost, tiles, work, roles, (40, 50, 60), ms, 1.0)
    assert one.loss(50) == 1 and one.loss(45) == 1.5 and one.loss(58) == 3.4
    assert one.chosen_by(role_splits.Prices()) == 66  # as much of both, and no memory to wait for
    assert one.chosen_by(role_splits.Prices(prefill=2.0)) == 88


@pytest.mark.parametrize("numbers", [(1.1, 0.9, 1.05, 0.2, 12.0), (0.9, 1.0, 0.95, 0.0, 4.0)])
def test_the_model_finds_the_numbers_of_times_that_it_made(
    role_splits: ModuleType, role_times: ModuleType, recorded: Any, numbers: tuple[float, ...]
) -> None:
    model = role_times.Model(*numbers)
    made = [
        replace(one, ms=[1e-3 * model.us(one, ctas) for ctas in one.ctas]) for one in recorded[::4]
    ]
    assert role_times.off(made, model) < 1e-9
    assert role_times.off(made, role_times.fitted(made)) < 0.01


def test_the_model_of_times_is_off_less_than_prices(
    role_splits: ModuleType, role_times: ModuleType, recorded: Any
) -> None:
    """The figures of docs/mixed-batches.md, found by `role_times.py`."""
    _, other = role_splits.halves_of(recorded)
    fitted = role_times.Model(1.0, 0.925, 1.05, 0.25, 14.0)
    assert round(role_times.off(other, role_times.Model()), 3) == 0.107
    assert round(role_times.off(other, fitted), 3) == 0.056
    chosen = [one.loss(role_times.chosen(one, fitted)) for one in other]
    assert sum(chosen) / len(chosen) > 1.02  # it waits for decodes where it is wrong by little
