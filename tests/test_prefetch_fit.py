"""The fit of prefetching finds constants that made-up steps were made with, and those of two GPUs.

The GPUs' steps are recorded (`benchmarks/results/prefetch*.jsonl`), so what is told of their
choices is read off them again here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from warploom.prefetch import H100, H100_OVERLAP, H200, H200_OVERLAP, Accelerator, Overlap

BANDWIDTH = 3e12
CHIP = replace(H200, memory_bandwidth=BANDWIDTH, l2_bytes=48e6)
TRUTH = Overlap(
    BANDWIDTH, startup=3e-6, rate=BANDWIDTH / 16, kept=24e6, hit_rate=5e12, fixed=0.8e-6,
    error=0.0, own_error=0.0,
)  # fmt: skip
READERS = {"a": 16e6, "b": 50e6, "c": 117e6, "d": 235e6}
BUDGETS = (2, 4, 8, 12, 16, 24, 40)
EVEN = dict.fromkeys(READERS, TRUTH)


@pytest.fixture
def fitter(harness: ModuleType) -> ModuleType:
    return __import__("fit_prefetch")


def recorded(harness: ModuleType, noise: float, truths: Mapping[str, Overlap] = EVEN) -> list[Any]:
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
                saved = truths[name].saved(collective, size, asked, sms)
                value = 1e6 * (without - saved) + noise * draw.normal()
                given = params | {"budget": asked, "sms": sms}
                impl = f"{megabytes} MB, {sms}"
                rows.append(harness.Row("prefetch", case, impl, value, "us", params=given))
    return rows


def test_constants_are_found_again(harness: ModuleType, fitter: ModuleType) -> None:
    model, *found = fitter.checked_fit(recorded(harness, 0.0), CHIP)
    assert model.kept == 24e6  # half of L2
    assert (model.startup, model.rate) == pytest.approx((3e-6, TRUTH.rate), rel=1e-4)
    assert (model.hit_rate, model.fixed) == pytest.approx((5e12, 0.8e-6), rel=1e-3)
    for one in found:
        assert one.error < 1e-9 and one.close == 1.0 and one.loss == 0.0


def test_noise_is_told_and_the_choice_does_not_lose(
    harness: ModuleType, fitter: ModuleType
) -> None:
    model, found, _ = fitter.checked_fit(recorded(harness, 0.3), CHIP)
    assert 0.2e-6 < model.error < 0.5e-6
    assert found.loss < 0.01 and found.missed < 0.03


def test_a_step_in_ten_that_is_far_off_moves_no_constant(
    harness: ModuleType, fitter: ModuleType
) -> None:
    rows = recorded(harness, 0.0)
    off = [
        replace(row, value=row.value + 3) if i % 10 == 9 and row.params["budget"] else row
        for i, row in enumerate(rows)
    ]
    assert off != rows
    model, _, _ = fitter.checked_fit(off, CHIP)
    assert (model.startup, model.rate) == pytest.approx((3e-6, TRUTH.rate), rel=1e-3)
    assert (model.hit_rate, model.fixed) == pytest.approx((5e12, 0.8e-6), rel=1e-2)


def test_readers_that_differ_are_told_by_their_own_constants(
    harness: ModuleType, fitter: ModuleType
) -> None:
    costs = {"a": -0.4e-6, "b": 0.3e-6, "c": 0.8e-6, "d": 2e-6}
    truths = {name: replace(TRUTH, fixed=cost) for name, cost in costs.items()}
    rows = recorded(harness, 0.0, truths)
    model, every, each = fitter.checked_fit(rows, CHIP)
    assert model.error == every.error > 0.5e-6
    assert model.own_error == each.error < 0.05e-6
    assert each.close > every.close and each.gained > every.gained
    models = fitter.for_each(model, fitter.halves(fitter.timed_rows(rows))[0])
    assert {name: one.fixed for name, one in models.items()} == pytest.approx(costs, abs=0.1e-6)
    assert {one.error for one in models.values()} == {model.own_error}


def test_constants_between_those_that_are_tried(harness: ModuleType, fitter: ModuleType) -> None:
    truth = replace(TRUTH, startup=2.7e-6, rate=BANDWIDTH / 18)
    model, found, _ = fitter.checked_fit(
        recorded(harness, 0.0, dict.fromkeys(READERS, truth)), CHIP
    )
    assert (model.startup, model.rate) == pytest.approx((2.7e-6, truth.rate), rel=1e-3)
    assert found.error < 0.01e-6 and found.close == 1.0 and found.loss == 0.0


def test_less_is_kept_than_half_of_l2(harness: ModuleType, fitter: ModuleType) -> None:
    """What the fit takes for known is wrong, and the error says so."""
    truth = replace(TRUTH, kept=12e6)
    _, found, _ = fitter.checked_fit(recorded(harness, 0.0, dict.fromkeys(READERS, truth)), CHIP)
    assert found.error > 0.1e-6


def test_one_odd_step_without_a_prefetch_is_in_no_saving(
    harness: ModuleType, fitter: ModuleType
) -> None:
    rows = recorded(harness, 0.0)
    odd = next(i for i, row in enumerate(rows) if row.case == "b, 20 us" and row.impl == "none")
    off = [replace(row, value=row.value + 1.5) if i == odd else row for i, row in enumerate(rows)]
    for one, other in zip(fitter.timed_rows(off), fitter.timed_rows(rows), strict=True):
        assert one.saved == pytest.approx(other.saved, abs=1e-12)


def test_halves_share_no_case(harness: ModuleType, fitter: ModuleType) -> None:
    one, other = fitter.halves(fitter.timed_rows(recorded(harness, 0.0)))
    assert not {x.case for x in one} & {x.case for x in other}
    assert {x.collective for x in one} == {x.collective for x in other}


def test_steps_that_were_chosen_are_not_fitted_to(harness: ModuleType, fitter: ModuleType) -> None:
    rows = recorded(harness, 0.0)
    chosen = [
        replace(row, impl="chosen", value=row.value + 1)
        for row in rows if row.params["budget"] == 8e6
    ]  # fmt: skip
    assert fitter.timed_rows([*rows, *chosen]) == fitter.timed_rows(rows)


def test_steps_without_a_prefetch_that_were_run_again_count(
    harness: ModuleType, fitter: ModuleType
) -> None:
    rows = recorded(harness, 0.0)
    plain = [row for row in rows if not row.params["budget"]]
    again = [
        replace(row, impl=impl, value=row.value + 1)
        for row in plain for impl in ("none again", "chosen")
    ]  # fmt: skip
    before, after = (fitter.alone(given) for given in (rows, [*rows, *again]))
    assert set(before) == set(READERS)
    assert after == pytest.approx({name: value + 1 for name, value in before.items()})


def test_a_choice_that_loses_is_seen(harness: ModuleType, fitter: ModuleType) -> None:
    """A model as generous as the paper's chooses what is on its way when the collective ends."""
    generous = Overlap(BANDWIDTH, 0.0, BANDWIDTH, 24e6, 1e15, 0.0, 0.0, 0.0)
    timed = fitter.timed_rows(recorded(harness, 0.0))
    found = fitter.quality(fitter.for_all(generous, timed), timed)
    assert found.loss > 0.03


RECORDED = {
    "H100": (H100, H100_OVERLAP, "prefetch_h100.jsonl"),
    "H200": (H200, H200_OVERLAP, "prefetch.jsonl"),
}


@pytest.fixture(params=RECORDED)
def gpu(
    request: pytest.FixtureRequest, harness: ModuleType
) -> tuple[Accelerator, Overlap, list[Any]]:
    """Recorded constants, and the rows that they were fitted to."""
    chip, model, file = RECORDED[request.param]
    machine, rows = harness.load_rows(harness.RESULTS / file)
    assert request.param in machine["device"]
    return replace(chip, memory_bandwidth=rows[0].params["bandwidth"]), model, list(rows)


def test_recorded_constants_are_those_of_the_rows(
    gpu: tuple[Accelerator, Overlap, list[Any]], fitter: ModuleType
) -> None:
    chip, model, rows = gpu
    found, _, _ = fitter.checked_fit(rows, chip)
    assert asdict(model) == pytest.approx(asdict(found), rel=1e-3)
    exchanged, _, _ = fitter.checked_fit(rows, chip, exchanged=True)
    assert (exchanged.rate, exchanged.hit_rate) == pytest.approx(
        (found.rate, found.hit_rate), rel=0.05
    )  # what they say does not hang on the half
    assert exchanged.startup == pytest.approx(found.startup, abs=0.4e-6)


def test_how_far_the_model_is_off(
    gpu: tuple[Accelerator, Overlap, list[Any]], fitter: ModuleType
) -> None:
    """On steps that were left out: at most the stated errors, and few parts of a step."""
    _, model, rows = gpu
    timed = fitter.timed_rows(rows)
    assert len(timed) == 288 and len({one.case for one in timed}) == 32
    fitted_to, left_out = fitter.halves(timed)
    every, each = fitter.for_all(model, timed), fitter.for_each(model, fitted_to)
    general, own = (fitter.quality(models, left_out) for models in (every, each))
    assert general.error <= 1.001 * model.error and own.error <= 1.001 * model.own_error
    assert own.error < general.error and own.close >= general.close > 0.25
    for one in (general, own):
        assert one.step < 0.061 and one.missed < 0.07
    for models in (every, each):  # chosen budgets lie between those that were run
        assert fitter.quality(models, timed).loss < 0.01


def test_bytes_and_ctas_that_are_chosen_lose_no_hundredth_of_a_step(
    gpu: tuple[Accelerator, Overlap, list[Any]], fitter: ModuleType
) -> None:
    """By the GPU's constants and with each reader's own; most steps gain."""
    _, model, rows = gpu
    timed = fitter.timed_rows(rows)
    every, each = fitter.for_all(model, timed), fitter.for_each(model, fitter.halves(timed)[0])
    for models in (every, each):
        chosen = fitter.choices(models, timed)
        assert len(chosen) == 32
        assert all(one.saved >= -0.01 * one.without for one in chosen)
        assert sum(one.saved for one in chosen) > 0.4 * sum(one.best for one in chosen)
        swept = {one.case: one for one in chosen if one.case.startswith("70B/TP8 gate, up")}
        behind = swept["70B/TP8 gate, up, 10 us"]
        assert behind.sms == 16 and behind.saved > 0.95 * behind.best  # 8 bring half of it
        assert swept["70B/TP8 gate, up, 20 us"].sms == swept["70B/TP8 gate, up, 40 us"].sms == 8


def test_budgets_that_were_chosen_and_run_lost_little(
    gpu: tuple[Accelerator, Overlap, list[Any]], fitter: ModuleType
) -> None:
    """By the model as it was then, each beside a step without that was timed again next to it."""
    _, model, rows = gpu
    plain = {row.case: row.value for row in rows if row.impl == "none again"}
    chosen = [row for row in rows if row.impl == "chosen"]
    assert len(chosen) == len(plain) == 32
    assert all(row.value <= 1.005 * plain[row.case] for row in chosen)
    run = [row for row in chosen if row.params["budget"]]
    off = [
        plain[row.case] - row.value - 1e6 * model.saved(
            1e-6 * row.params["collective_us"], row.params["bytes"], row.params["budget"],
            row.params["sms"],
        )
        for row in run
    ]  # fmt: skip
    assert float(np.sqrt(np.mean(np.square(off)))) < 1.35e6 * model.error
