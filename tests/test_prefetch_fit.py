"""The fit of prefetching finds constants that made-up steps were made with, and those of two GPUs.

The GPUs' steps are recorded (`benchmarks/results/prefetch*.jsonl`), so what is told of their
choices is read off them again here.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from warploom.prefetch import H100_OVERLAP, H200_OVERLAP, Overlap

BANDWIDTH = 3e12
TRUTH = Overlap(
    BANDWIDTH, startup=3e-6, rate=BANDWIDTH / 16, kept=24e6, gain=0.6, late=0.3, fork=0.8e-6,
    error=0.0,
)  # fmt: skip
READERS = {"a": 16e6, "b": 50e6, "c": 117e6, "d": 235e6}
BUDGETS = (2, 4, 8, 12, 16, 24, 40)


@pytest.fixture
def fitter(harness: ModuleType) -> ModuleType:
    return __import__("fit_prefetch")


def recorded(harness: ModuleType, noise: float, truth: Overlap = TRUTH) -> list[Any]:
    """Rows as `prefetch.py` writes them; noise in microseconds."""
    draw = np.random.default_rng(20)
    rows = []
    for (name, size), collective in product(READERS.items(), (5e-6, 10e-6, 20e-6, 40e-6)):
        without = collective + size / BANDWIDTH
        case = f"{name}, {1e6 * collective:.0f} us"
        params = {"collective_us": 1e6 * collective, "bytes": size, "sms": 8, "budget": 0}
        rows.append(harness.Row("prefetch", case, "none", 1e6 * without, "us", params=params))
        for sms, megabytes in product((8, 16), BUDGETS):
            asked = 1e6 * megabytes
            if asked < size:
                saved = truth.saved(collective, size, asked, sms)
                value = 1e6 * (without - saved) + noise * draw.normal()
                given = params | {"budget": asked, "sms": sms}
                impl = f"{megabytes} MB, {sms}"
                rows.append(harness.Row("prefetch", case, impl, value, "us", params=given))
    return rows


def test_constants_are_found_again(harness: ModuleType, fitter: ModuleType) -> None:
    model, found = fitter.checked_fit(recorded(harness, 0.0), BANDWIDTH)
    assert model.startup == pytest.approx(3e-6) and model.kept == pytest.approx(24e6)
    assert model.rate == pytest.approx(TRUTH.rate, rel=1e-6)
    assert (model.gain, model.late, 1e6 * model.fork) == pytest.approx((0.6, 0.3, 0.8), rel=1e-4)
    assert found.error < 1e-9 and found.close == 1.0 and found.loss == 0.0


def test_noise_is_told_and_the_choice_does_not_lose(
    harness: ModuleType, fitter: ModuleType
) -> None:
    model, found = fitter.checked_fit(recorded(harness, 0.3), BANDWIDTH)
    assert 0.2e-6 < model.error < 0.5e-6
    assert found.loss < 0.01 and found.missed < 0.03


def test_constants_between_those_that_are_tried(harness: ModuleType, fitter: ModuleType) -> None:
    truth = replace(TRUTH, startup=2.7e-6, rate=BANDWIDTH / 18, kept=22.3e6)
    _, found = fitter.checked_fit(recorded(harness, 0.0, truth), BANDWIDTH)
    assert found.error < 0.3e-6 and found.close > 0.85 and found.loss < 0.01


def test_halves_share_no_case(harness: ModuleType, fitter: ModuleType) -> None:
    one, other = fitter.halves(fitter.timed_rows(recorded(harness, 0.0)))
    assert not {x.case for x in one} & {x.case for x in other}
    assert {x.collective for x in one} == {x.collective for x in other}


def test_steps_without_a_prefetch_are_not_fitted_to(
    harness: ModuleType, fitter: ModuleType
) -> None:
    rows = recorded(harness, 0.0)
    again = [
        harness.Row("prefetch", row.case, impl, row.value + 1, "us", params=row.params)
        for row in rows if row.impl == "none" for impl in ("none again", "chosen")
    ]  # fmt: skip
    assert fitter.timed_rows([*rows, *again]) == fitter.timed_rows(rows)


def test_a_choice_that_loses_is_seen(harness: ModuleType, fitter: ModuleType) -> None:
    """A model as generous as the paper's chooses what is on its way when the collective ends."""
    generous = Overlap(BANDWIDTH, 0.0, BANDWIDTH, 24e6, 1.0, 0.0, 0.0, 0.0)
    found = fitter.quality(generous, fitter.timed_rows(recorded(harness, 0.0)))
    assert found.loss > 0.03


RECORDED = {"H100": (H100_OVERLAP, "prefetch_h100.jsonl"), "H200": (H200_OVERLAP, "prefetch.jsonl")}


@pytest.fixture(params=RECORDED)
def gpu(request: pytest.FixtureRequest, harness: ModuleType) -> tuple[Overlap, list[Any]]:
    """Recorded constants, and the rows that they were fitted to."""
    model, file = RECORDED[request.param]
    machine, rows = harness.load_rows(harness.RESULTS / file)
    assert request.param in machine["device"]
    return model, list(rows)


def test_recorded_constants_are_those_of_the_rows(
    gpu: tuple[Overlap, list[Any]], fitter: ModuleType
) -> None:
    model, rows = gpu
    found, _ = fitter.checked_fit(rows, rows[0].params["bandwidth"])
    assert asdict(model) == pytest.approx(asdict(found), rel=1e-3)


def test_how_far_the_model_is_off(gpu: tuple[Overlap, list[Any]], fitter: ModuleType) -> None:
    """On steps that were left out of the fit: at most the stated error, and few parts of a step."""
    model, rows = gpu
    timed = fitter.timed_rows(rows)
    assert len(timed) == 288 and len({one.case for one in timed}) == 32
    left_out = fitter.quality(model, fitter.halves(timed)[1])
    assert left_out.error <= 1.001 * model.error
    assert left_out.step < 0.08 and left_out.missed < 0.071
    assert fitter.quality(model, timed).loss < 0.011  # between budgets that were run


def test_chosen_budgets_were_run_and_lost_little(gpu: tuple[Overlap, list[Any]]) -> None:
    """Each beside a step without a prefetch that was timed again next to it."""
    model, rows = gpu
    plain = {row.case: row.value for row in rows if row.impl == "none again"}
    chosen = [row for row in rows if row.impl == "chosen"]
    assert len(chosen) == len(plain) == 32
    for row in chosen:
        at = row.params
        told = model.best_bytes(1e-6 * at["collective_us"], at["bytes"], at["sms"])
        assert told == pytest.approx(at["budget"], rel=1e-3)
        assert row.value <= 1.005 * plain[row.case]
