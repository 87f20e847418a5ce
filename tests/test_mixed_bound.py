"""What overlapping could gain by prices, beside what was measured."""

from __future__ import annotations

from types import ModuleType

import pytest

from warploom.codegen.choice.role_cost import RoleCost


@pytest.fixture
def mixed_bound(harness: ModuleType) -> ModuleType:
    return __import__("mixed_bound")


@pytest.mark.parametrize(
    ("prefills", "decodes", "best"),
    [
        (132 * 100, 66 * 100, 200 / 150),  # 100 us each in turn: CTAs are the limit
        (132 * 10, 66 * 100, 110 / 100),  # memory is
        (132 * 10, 0, 1.0),
    ],
)
def test_at_best_the_longer_of_memory_and_ctas_counts(
    mixed_bound: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    prefills: int,
    decodes: int,
    best: float,
) -> None:
    cost = RoleCost(prefill=1_000_000, decode=1_000_000, saturating=66)
    monkeypatch.setattr(mixed_bound, "counted", lambda batch: (cost, prefills, decodes))
    assert mixed_bound.bound_of(None) == pytest.approx(best)


def test_the_record_has_gained_less_than_it_could(
    mixed_bound: ModuleType, harness: ModuleType
) -> None:
    """The figures of docs/mixed-batches.md."""
    _, rows = harness.load_rows(harness.RESULTS / "mixed_drawn_peers.jsonl")
    found = mixed_bound.gains(rows)
    assert len(found) == 100
    bound, got = mixed_bound.means(found)
    assert (round(bound, 3), round(got, 3)) == (1.188, 1.134)


def test_rows_without_both_ways_are_left_out(mixed_bound: ModuleType, harness: ModuleType) -> None:
    _, rows = harness.load_rows(harness.RESULTS / "mixed_drawn_peers.jsonl")
    assert mixed_bound.gains([row for row in rows if row.impl != "one plan"]) == []
