"""The model of what prefetches save on a GPU: its terms by hand, its choice, its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.errors import ArgumentError
from warploom.prefetch import Overlap, Timed

# Round numbers, of no GPU: 2 TB/s, of which 8 CTAs ask for the half, and hits at twice that.
MADE_UP = Overlap(
    bandwidth=2e12, startup=2e-6, rate=125e9, kept=20e6, hit_rate=4e12, fixed=1e-6,
    error=0.5e-6, own_error=0.25e-6,
)  # fmt: skip


@pytest.mark.parametrize(
    ("collective", "asked", "saved"),
    [
        (12e-6, 0, 0.0),
        (12e-6, 8e6, 0.5 * 4e-6 - 1e-6),  # asked for in 10 us
        (12e-6, 14e6, 0.5 * 7e-6 - 4e-6 - 1e-6),  # in 16 us, for which the reader waits
        (1e-6, 4e6, 0.5 * 2e-6 - 5e-6 - 1e-6),
        (42e-6, 30e6, 0.5 * 10e-6 - 1e-6),  # 10 MB more than is kept
        (42e-6, 40e6, 0.5 * 10e-6 - 1e-6),
    ],
)
def test_terms_by_hand(collective: float, asked: float, saved: float) -> None:
    assert MADE_UP.saved(collective, 100e6, asked, 8) == pytest.approx(saved, abs=1e-12)


def test_no_more_is_asked_for_than_is_read() -> None:
    assert MADE_UP.saved(12e-6, 4e6, 8e6, 8) == pytest.approx(0.5 * 2e-6 - 1e-6, abs=1e-12)


def test_what_has_not_come_is_read_as_any_other_byte() -> None:
    """64 CTAs ask for four times what memory brings: done in 4 us, when 4 of 16 MB are there."""
    saved = MADE_UP.saved(4e-6, 100e6, 16e6, 64)
    assert saved == pytest.approx(0.5 * 2e-6 - 1e-6, abs=1e-12)


def test_ctas_ask_until_memory_is_the_limit() -> None:
    one, eight, many = (MADE_UP.arrives(12e-6, sms) for sms in (1, 8, 64))
    assert (one, eight, many) == pytest.approx((1.25e6, 10e6, 20e6))


def test_none_is_chosen_where_two_errors_would_lose_a_hundredth_of_the_step() -> None:
    nine = 9_000_000 // 128 * 128  # 10 MB would arrive
    saving = MADE_UP.saved(12e-6, 100e6, nine, 8)
    step = 12e-6 + 100e6 / 2e12
    bound = (saving + 0.01 * step) / 2
    assert replace(MADE_UP, error=0.99 * bound).best_bytes(12e-6, 100e6, 8) == nine
    assert replace(MADE_UP, error=1.01 * bound).best_bytes(12e-6, 100e6, 8) == 0


def test_none_is_chosen_where_nothing_is_saved() -> None:
    """3 MB: 0.68 us gained, 1 us paid, and a step so long that 1 % of it is more."""
    sure = replace(MADE_UP, error=0.0)
    assert sure.saved(5e-6, 1e9, 2.7e6, 8) == pytest.approx(-0.325e-6)
    assert sure.best_bytes(5e-6, 1e9, 8) == 0


def test_more_ctas_where_fewer_would_not_bring_what_is_kept() -> None:
    """16 CTAs ask for as much as memory brings, 8 for half of it."""
    sure = replace(MADE_UP, error=0.0)
    nine, eighteen = (n // 128 * 128 for n in (9_000_000, 18_000_000))
    assert sure.best(12e-6, 100e6, (8,)) == (nine, 8)
    assert sure.best(12e-6, 100e6) == (eighteen, 16)  # 32 bring no more
    assert sure.best(42e-6, 100e6) == (20_000_000, 8)  # all that is kept
    assert sure.best(2e-6, 100e6) == (0, 8)


def test_no_ctas() -> None:
    for wrong in ((), (8, 0)):
        with pytest.raises(ArgumentError, match="sms"):
            MADE_UP.best(12e-6, 100e6, wrong)


def steps(*off: float) -> list[Timed]:
    """Of a reader that gains so many seconds more than the GPU's constants say."""
    said = MADE_UP.saved(12e-6, 100e6, 8e6, 8)
    return [Timed("mine, 12 us", 12e-6, 100e6, 8e6, 8, 60e-6, 60e-6 - said - x) for x in off]


def test_a_reader_has_its_own_constant() -> None:
    own = MADE_UP.for_reader(steps(0.4e-6, 0.5e-6, 9e-6))  # one graph was far off
    assert own.fixed == pytest.approx(0.5e-6)
    assert own == replace(MADE_UP, fixed=own.fixed, error=MADE_UP.own_error)
    assert own.saved(22e-6, 100e6, 16e6, 8) == pytest.approx(0.5 * 8e-6 - 0.5e-6)


def test_a_reader_without_steps() -> None:
    with pytest.raises(ArgumentError, match="timed"):
        MADE_UP.for_reader([])


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


@pytest.mark.parametrize(
    "wrong",
    [{"rate": 0.0}, {"kept": -1.0}, {"hit_rate": 0.0}, {"fixed": float("nan")}, {"error": -1.0}],
)
def test_constants_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match="overlap"):
        replace(MADE_UP, **wrong)
