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
def recorded(fit: ModuleType, harness: ModuleType) -> list[Any]:
    return list(fit.load(harness.RESULTS / "mixed_drawn.jsonl"))


def test_the_shipped_numbers_are_those_that_are_fitted(fit: ModuleType, recorded: Any) -> None:
    assert len(recorded) == 100
    first, others = recorded[: fit.FITTED], recorded[fit.FITTED :]
    assert fit.fitted(first) == fit.SHIPPED
    assert fit.mean_loss(others, fit.SHIPPED) < 1.002
    always = fit.SHIPPED._replace(opening=-(10**15))  # two roles, whatever they gain
    assert fit.mean_loss(others, always) > fit.mean_loss(others, fit.SHIPPED)


def test_the_fit_finds_a_rule_by_which_batches_were_timed(fit: ModuleType) -> None:
    """Batches whose faster way is decided by other numbers than those that are shipped."""
    cost = RoleCost(prefill=1_000_000, decode=1_000_000, saturating=60)
    truth = fit.Margins(opening=20 * 10**6, spread=10, longer=8)
    made = []
    for number in range(60):
        plain = fit.Timed(str(number), cost, 20_000, 150 * number, 1.0, 1.0)
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
