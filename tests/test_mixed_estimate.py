"""What full overlap would gain by prices, beside what was measured."""

from __future__ import annotations

from types import ModuleType

import pytest

from warploom.codegen.choice.role_cost import RoleCost


@pytest.fixture
def mixed_estimate(harness: ModuleType) -> ModuleType:
    return __import__("mixed_estimate")


@pytest.mark.parametrize(
    ("prefills", "decodes", "best"),
    [
        (132 * 100, 66 * 100, 200 / 150),  # 100 us each in turn: CTAs are the limit
        (132 * 10, 66 * 100, 110 / 100),  # memory is
        (132 * 10, 0, 1.0),
    ],
)
def test_the_longer_of_memory_and_ctas_counts(
    mixed_estimate: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    prefills: int,
    decodes: int,
    best: float,
) -> None:
    cost = RoleCost(prefill=1_000_000, decode=1_000_000, saturating=66)
    monkeypatch.setattr(mixed_estimate, "counted", lambda batch: (cost, prefills, decodes))
    assert mixed_estimate.estimate_of(None) == pytest.approx(best)


def test_the_record_gained_less_on_average_and_more_in_some_batches(
    mixed_estimate: ModuleType, harness: ModuleType
) -> None:
    """The figures of docs/mixed-batches.md."""
    _, rows = harness.load_rows(harness.RESULTS / "mixed_drawn_peers.jsonl")
    found = mixed_estimate.gains(rows)
    assert len(found) == 100
    estimate, got = mixed_estimate.means(found)
    assert (round(estimate, 3), round(got, 3)) == (1.189, 1.165)
    assert mixed_estimate.passed(found) == 38
    assert mixed_estimate.passed(found, mixed_estimate.MUCH) == 15


def test_what_passes_the_estimate_is_printed(
    mixed_estimate: ModuleType, harness: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed_estimate.main([str(harness.RESULTS / "mixed_drawn_peers.jsonl")])
    said = capsys.readouterr().out
    (whole,) = (line for line in said.splitlines() if line.strip(" │").startswith("all"))
    assert whole.replace("│", " ").split() == ["all", "100", "1.189", "1.165", "38", "15"]
    assert "Furthest above: 71: 556/1891/18, 32/8, window, estimate 1.319, got 1.698" in said


def test_only_what_is_above_passes_an_estimate(mixed_estimate: ModuleType) -> None:
    found = [mixed_estimate.Gain(None, 1.2, got) for got in (1.1, 1.2, 1.23, 1.3)]
    assert mixed_estimate.passed(found) == 2 and mixed_estimate.passed(found, 1.05) == 1


def test_rows_without_both_ways_are_left_out(
    mixed_estimate: ModuleType, harness: ModuleType
) -> None:
    _, rows = harness.load_rows(harness.RESULTS / "mixed_drawn_peers.jsonl")
    assert mixed_estimate.gains([row for row in rows if row.impl != "one plan"]) == []
