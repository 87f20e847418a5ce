"""What is said of the times themselves: noise is found, and what readers differ by is not noise."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from warploom.prefetch import H200, Overlap

CHIP = replace(H200, memory_bandwidth=3e12)
TRUTH = Overlap(3e12, 1e-6, 200e9, CHIP.budget, 6e12, 0.2e-6, 0.0, 0.0)
SIZE = 60e6


@pytest.fixture
def noise(harness: ModuleType) -> ModuleType:
    return __import__("prefetch_noise")


def recorded(harness: ModuleType, spread: float, gains: float = 0.0) -> list[Any]:
    """Rows of six readers, each off by normal noise, and of its own gain; microseconds."""
    draw = np.random.default_rng(3)
    rows = []
    for name in "abcdef":
        own = gains * draw.normal()
        for collective, megabytes in product((10, 20, 30, 40), (0, 2, 4, 6, 8, 10, 12)):
            asked = 1e6 * megabytes
            saved = TRUTH.saved(1e-6 * collective, SIZE, asked, 8) + 1e-6 * own * bool(asked)
            params = {"collective_us": collective, "bytes": SIZE, "sms": 8, "budget": asked}
            value = collective + 20 - 1e6 * saved + spread * draw.normal()
            impl = f"{megabytes} MB" if megabytes else "none"
            case = f"{name}, {collective} us"
            rows.append(harness.Row("prefetch", case, impl, value, "us", params=params))
    return rows


def test_the_spread_is_found(harness: ModuleType, noise: ModuleType) -> None:
    found = noise.noise(recorded(harness, 0.1), CHIP)
    assert found.spread == pytest.approx(0.1e-6, rel=0.2)
    assert found.middle == pytest.approx(0.1e-6, rel=0.25)
    assert 0.05e-6 < found.plain < 0.15e-6


def test_one_graph_that_is_far_off_moves_only_what_squares_tell(
    harness: ModuleType, noise: ModuleType
) -> None:
    rows = recorded(harness, 0.05)
    odd = next(i for i, row in enumerate(rows) if row.impl == "8 MB")
    rows[odd] = replace(rows[odd], value=rows[odd].value + 10)
    found = noise.noise(rows, CHIP)
    assert found.spread > 0.4e-6 and found.middle < 0.08e-6


def test_steps_that_come_late_are_no_repeats(harness: ModuleType, noise: ModuleType) -> None:
    timed = noise.timed_rows(recorded(harness, 0.0))
    groups = noise.repeats(timed, replace(TRUTH, rate=60e9))  # a MB in 2.1 us
    in_time = {2: 4, 4: 4, 6: 3, 8: 3, 10: 2, 12: 2}
    assert [len(group) for group in groups] == 6 * list(in_time.values())
    assert [group[0].asked for group in groups] == 6 * [1e6 * megabytes for megabytes in in_time]


def test_all_is_decidable_without_noise(harness: ModuleType, noise: ModuleType) -> None:
    found = noise.noise(recorded(harness, 1e-6), CHIP)
    assert found.decidable == found.decidable_savings == 1.0
    assert found.again == found.general == found.own == found.decided == 1.0
    assert found.large > 20


def test_nothing_is_decidable_with_much(harness: ModuleType, noise: ModuleType) -> None:
    found = noise.noise(recorded(harness, 0.5), CHIP)
    assert found.decidable == found.decidable_savings == found.decided == 0.0
    assert found.again < 0.6 and found.own < 0.6


def test_readers_that_differ_are_no_noise(harness: ModuleType, noise: ModuleType) -> None:
    found = noise.noise(recorded(harness, 0.01, gains=0.5), CHIP)
    assert found.spread < 0.02e-6
    assert found.again > 0.95 and found.own > 0.75 and found.general < 0.2


def test_the_recorded_ones(harness: ModuleType, noise: ModuleType) -> None:
    """What `docs/prefetch.md` says: no saving of the H200's is decidable, and how many repeat."""
    for file, name in (("prefetch.jsonl", "H200"), ("prefetch_h100.jsonl", "H100")):
        _, rows = harness.load_rows(harness.RESULTS / file)
        chip = noise.chip_of(name, rows[0].params["bandwidth"])
        found = noise.noise(rows, chip)
        assert 0.15e-6 < found.middle < 0.25e-6 < 0.3e-6 < found.spread < 0.45e-6
        assert found.general < found.own < found.again < found.decided
        assert found.decidable_savings == 0 if name == "H200" else found.decidable_savings < 0.35
