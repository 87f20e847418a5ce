"""When two roles are chosen: fitted to recorded batches, and right for those left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from warploom.codegen.choice.role_cost import RoleCost


@pytest.fixture
def fit(harness: ModuleType) -> ModuleType:
    return __import__("fit_roles")


@pytest.fixture
def recorded(fit: ModuleType, harness: ModuleType) -> list[list[Any]]:
    return [list(fit.load(harness.RESULTS / name)) for name in fit.FILES]


def test_the_shipped_numbers_are_those_that_are_fitted(fit: ModuleType, recorded: Any) -> None:
    assert [len(batches) for batches in recorded] == [100, 64]
    first, others = fit.parted(recorded)
    assert len(first) == 65
    assert fit.fitted(first) == fit.SHIPPED
    drawn, light = (fit.parted([batches])[1] for batches in recorded)
    assert fit.mean_loss(drawn, fit.SHIPPED) < 1.002 and fit.mean_loss(light, fit.SHIPPED) < 1.011
    asked = sum(one.pays(fit.SHIPPED) for one in recorded[1])
    assert asked == 52  # as the record says of its plans
    always = fit.SHIPPED._replace(spread=10**15)  # two roles, whatever they gain
    assert fit.mean_loss(others, always) > fit.mean_loss(others, fit.SHIPPED)


def test_the_fit_finds_a_rule_by_which_batches_were_timed(fit: ModuleType) -> None:
    """Batches whose faster way is decided by other numbers than those that are shipped."""
    cost = RoleCost(prefill=1_000_000, decode=1_000_000, saturating=60)
    truth = fit.Margins(spread=10, longer=8)
    made = []
    for number in range(60):
        plain = fit.Timed(str(number), cost, 20_000, 150 * number, True, 1.0, 1.0)
        faster = 0.8 if plain.pays(truth) else 1.2
        made.append(replace(plain, two_roles=faster))
    found = fit.fitted(made)
    assert fit.mean_loss(made, found) < 1.001 < fit.mean_loss(made, fit.SHIPPED)


def test_rows_without_both_ways_are_left_out(
    fit: ModuleType, harness: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "mixed_drawn.jsonl"
    path.write_text((harness.RESULTS / "mixed_drawn_again.jsonl").read_text())  # two other rows
    assert list(fit.load(path)) == []
