"""The model of what prefetches save on a GPU: its terms by hand, its choice, its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.errors import ArgumentError
from warploom.prefetch import Overlap

# Round numbers, of no GPU: 2 TB/s, of which 8 CTAs ask for the half.
MADE_UP = Overlap(
    bandwidth=2e12, startup=2e-6, rate=125e9, kept=20e6, gain=0.5, late=0.25, fork=1e-6,
    error=0.5e-6,
)  # fmt: skip


@pytest.mark.parametrize(
    ("collective", "asked", "saved"),
    [
        (12e-6, 0, 0.0),
        (12e-6, 8e6, 0.5 * 4e-6 - 1e-6),  # 10 MB would arrive
        (12e-6, 14e6, 0.5 * 5e-6 - 0.25 * 4e-6 - 1e-6),  # 4 MB come late, in 4 us
        (1e-6, 4e6, -0.25 * 4e-6 - 1e-6),  # nothing comes in time
        (42e-6, 30e6, 0.5 * 5e-6 - 1e-6),  # 10 MB more than is kept: as many are lost
        (42e-6, 40e6, -1e-6),
    ],
)
def test_terms_by_hand(collective: float, asked: float, saved: float) -> None:
    assert MADE_UP.saved(collective, 100e6, asked, 8) == pytest.approx(saved, abs=1e-12)


def test_ctas_ask_until_memory_is_the_limit() -> None:
    one, eight, many = (MADE_UP.arrives(12e-6, sms) for sms in (1, 8, 64))
    assert (one, eight, many) == pytest.approx((1.25e6, 10e6, 20e6))


def test_none_is_chosen_within_two_errors() -> None:
    assert MADE_UP.best_bytes(12e-6, 100e6, 8) == 9_000_000 // 128 * 128  # 10 MB would arrive
    assert MADE_UP.best_bytes(5e-6, 100e6, 8) == 0  # 3 MB: 0.75 us gained, 1 us paid
    saving = MADE_UP.saved(12e-6, 100e6, 9e6, 8)
    assert replace(MADE_UP, error=0.49 * saving).best_bytes(12e-6, 100e6, 8) > 0
    assert replace(MADE_UP, error=0.51 * saving).best_bytes(12e-6, 100e6, 8) == 0


@settings(max_examples=40)
@given(
    st.floats(1e-6, 50e-6), st.floats(1e5, 3e8), st.integers(1, 64), st.floats(0, 3e8),
)  # fmt: skip
def test_no_budget_is_better_than_the_chosen_one_by_more_than_its_margin(
    collective: float, size: float, sms: int, asked: float
) -> None:
    sure = replace(MADE_UP, error=0.0)
    chosen = sure.best_bytes(collective, size, sms)
    best = sure.saved(collective, size, chosen, sms)
    margin = 0.1 * sure.arrives(collective, sms) * sure.gain / sure.bandwidth + 128 / sure.bandwidth
    assert best >= 0 and best >= sure.saved(collective, size, asked, sms) - margin


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"kept": -1.0}, {"gain": -0.1}, {"error": -1.0}])
def test_constants_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match="overlap"):
        replace(MADE_UP, **wrong)
