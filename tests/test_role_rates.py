"""What SMs compute and read is read off a record, and the prices of two roles are near it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def role_rates(harness: ModuleType) -> ModuleType:
    return __import__("role_rates")


def made(harness: Any, role_rates: Any, impl: str, tflops: float, gbs: float, most: float) -> Any:
    """Rows of a GPU whose SMs do so much each, until memory gives no more."""
    for sms in role_rates.SMS:
        values = ("prefill", "TFLOP/s", tflops * sms), ("decode", "GB/s", min(most, gbs * sms))
        for role, unit, value in values:
            name, params = f"{sms} SMs", {"role": role, "sms": sms}
            yield harness.Row("role_rates", name, f"{role} {impl}", value, unit, params=params)


def test_the_rates_are_those_by_which_rows_were_made(
    harness: ModuleType, role_rates: ModuleType
) -> None:
    rows = [
        *made(harness, role_rates, "alone", 4.0, 60.0, 4000.0),
        *made(harness, role_rates, "beside", 3.5, 50.0, 3000.0),
    ]
    alone, beside = (role_rates.rates(rows, impl) for impl in ("alone", "beside"))
    assert alone.tflops == pytest.approx(4.0) and beside.tflops == pytest.approx(3.5)
    assert alone.gbs == pytest.approx(60.0) and beside.gbs == pytest.approx(50.0)
    assert alone.saturating == pytest.approx(4000 / 60)


def test_the_prices_lie_between_what_sms_do_alone_and_beside_each_other(
    harness: ModuleType, role_rates: ModuleType
) -> None:
    _, rows = harness.load_rows(harness.RESULTS / "role_rates.jsonl")
    alone, beside = (role_rates.rates(rows, impl) for impl in ("alone", "beside"))
    prices = role_rates.priced()
    assert beside.tflops < prices.tflops < alone.tflops
    assert beside.gbs < prices.gbs < alone.gbs
    assert 0.95 * alone.most_gbs < prices.most_gbs < alone.most_gbs
