"""Gains that xLLM reports beside those simulated: their directions, and what each follows from."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from warploom.serving.simulation import comparisons as figures
from warploom.serving.simulation.steps import Step
from warploom.simulate import RECORDED, Comparison, DualStreams, RooflineCosts, comparisons


@pytest.fixture(scope="module")
def compared() -> dict[str, Comparison]:
    return {f"{one.what}, {one.unit}": one for one in comparisons()}


def test_all_gains_have_the_direction_that_xllm_reports(compared: dict[str, Comparison]) -> None:
    assert not [one.what for one in compared.values() if not one.reported * one.simulated > 0]


def test_two_streams_lose_where_a_split_reads_more_than_it_hides() -> None:
    """Each half of a small batch reads all weights: of attention's products, and of the experts."""
    costs = RooflineCosts(figures.R1_LIKE, groups=32)
    read = costs.machine.rates.memory_bandwidth
    weights = sum(
        one.bytes
        for one in (
            *figures.R1_LIKE.attention(1, 0, 0, 0, 2)[::2], *figures.R1_LIKE.mlp(32, 0, 2)
        )
    )  # fmt: skip
    for requests in (64, 128, 256):
        batch = figures.decodes([4000] * requests)
        step, streams = Step(0, (batch,) * 32), DualStreams()
        whole = costs.layer(step, 1.0, 1.0)
        halves = [
            one
            for half in step.micro(2)
            for one in costs.layer(half, streams.compute, streams.communication)
        ]
        more = sum(one.seconds for one in halves[::2]) - sum(one.seconds for one in whole[::2])
        hidden_at_most = sum(one.seconds for one in whole[1::2])
        if requests < 256:  # bound by reads, of which all but the weights are halved
            assert more == pytest.approx(weights / read, rel=0.01)
        assert (more > hidden_at_most) == (figures.streams_of_ours(batch) < 0) == (requests < 256)


def test_the_batch_beside_table_7_computes_as_long() -> None:
    """13.0 ms a layer; the largest batch of decodes that is drawn computes a tenth of it."""
    costs = RooflineCosts(figures.R1_LIKE, groups=32)
    for batch, low, high in (
        (figures.PROMPTS_OF_TABLE_7, 12.9e-3, 13.2e-3),
        (figures.decodes([4000] * 512), 0.0, 1.5e-3),
    ):
        layer = costs.layer(Step(0, (batch,) * 32), 1.0, 1.0)
        assert low <= sum(one.seconds for one in layer[::2]) < high


def test_the_smallest_model_gains_most_by_planning_ahead(compared: dict[str, Comparison]) -> None:
    found = [one for name, one in compared.items() if name.startswith("asynchronous")]
    assert [one.fitted for one in found] == [True, False, False, False]
    assert found[0].simulated == pytest.approx(17.4, abs=0.1)
    gains = [one.simulated for one in found]
    assert gains == sorted(gains, reverse=True) and gains[-1] > 0.3


def test_a_host_with_work_for_each_layer_orders_all_but_the_7b(
    compared: dict[str, Comparison],
) -> None:
    found = [one for name, one in compared.items() if name.startswith("host by layers")]
    of_7b, of_14b, of_32b = (one.simulated for one in found)
    assert of_14b < of_32b < 17.4 and found[1].reported < found[2].reported < 17.4
    assert of_7b > of_32b and found[0].reported < found[1].reported  # the one that is not


def test_what_xllm_hid_of_the_host_goes_by_layers_but_for_the_7b() -> None:
    """Table 6: tokens a second in turn and a step ahead; microseconds by requests of a step."""
    table = ((8709.90, 10223.15), (3183.68, 3201.83), (1472.22, 1527.23), (1415.20, 1508.76))
    gains = [100 * (ahead / in_turn - 1) for in_turn, ahead in table]
    assert gains == pytest.approx([gain for _, gain in figures.TABLE_6], abs=0.05)
    hidden = [1e6 / in_turn - 1e6 / ahead for in_turn, ahead in table]
    assert hidden == pytest.approx([17.0, 1.8, 24.5, 43.8], abs=0.05)
    layers = [model.layers for model, _ in figures.TABLE_6]
    by_layer = [one / n for one, n in zip(hidden, layers, strict=True)]
    assert by_layer == pytest.approx([0.61, 0.06, 0.51, 0.68], abs=0.01)


def test_two_streams_leave_of_xllms_times_what_only_one_can_do() -> None:
    """By hand: 17.0 ms of computation a layer, and once, at the end, a half of a half of 12.4."""
    one, two = figures.streams_of_xllm()
    assert one == pytest.approx(13.0 + 9.3)
    assert two == pytest.approx(17.0 + 12.4 / 4 / 61)


def test_balance_in_closed_form(compared: dict[str, Comparison]) -> None:
    """Half of 20k tokens, 576 numbers each, in 61 layers; and 32k tokens over 24 cores."""
    bytes_of_gap = 10_000 * 576 * 2 * 61
    saved = compared["balance: a gap of 20k tokens, us a step"].simulated
    assert saved == pytest.approx(1e6 * bytes_of_gap / RECORDED.bandwidth, rel=0.01)
    cut = compared["balance: 32k tokens, cut, tokens a core"].simulated
    assert 32_000 / 24 <= cut <= 1.15 * 32_000 / 24
    assert compared["balance: by KV tokens, and migration, %"].simulated > 1


def test_the_picture_is_drawn(
    harness: Any, compared: dict[str, Comparison], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    script = import_module("simulation")
    script.draw(tmp_path / "simulation.png", list(compared.values()))
    assert (tmp_path / "simulation.png").read_bytes().startswith(b"\x89PNG")
    assert script.schedule_table().row_count == 6
    assert script.stream_table().row_count == 6
