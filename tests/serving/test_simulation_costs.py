"""Costs that feed the simulator, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from warploom.serving.simulation.roofline import REPLAY
from warploom.serving.simulation.steps import Batch, Piece, Step
from warploom.simulate import (
    RECORDED,
    Asynchronous,
    Deployment,
    DualStreams,
    Engine,
    GivenCosts,
    LeastTokens,
    Limits,
    Line,
    Machine,
    Migration,
    ModelShape,
    Request,
    RooflineCosts,
    Section,
    Serial,
    draw_timelines,
    read_measured,
    read_trace,
    simulate,
    synthetic,
    write_trace,
)
from warploom.simulation_errors import (
    BadCost,
    BadSetup,
    BadSplit,
    BadTraceLine,
    EmptyTrace,
    NeverFits,
    NoMeasurement,
    NoTrace,
    UnknownTraceField,
)

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL = ModelShape("small", 3, 512, 8, 2, 2048, head_dim=64)


def decodes(count: int, keys: int) -> Step:
    return Step(0, (Batch(tuple(Piece(i, 1, keys) for i in range(count))),))


# --- costs ----------------------------------------------------------------------------------------


def test_recorded_figures_are_those_of_the_results() -> None:
    found = read_measured(RESULTS)
    for name in ("throughput", "bandwidth"):
        assert getattr(found, name) == pytest.approx(getattr(RECORDED, name), rel=1e-3)
    for name in ("mixed_plan", "planner_kernel", "append_kernel"):
        for requests in (1, 64, 512):
            said = getattr(RECORDED, name)(requests)
            assert getattr(found, name)(requests) == pytest.approx(said, rel=0.02)


def test_a_line_goes_through_its_points() -> None:
    line = Line.through([(1, 5.0), (3, 9.0)])
    assert (line.fixed, line.each) == (pytest.approx(3.0), pytest.approx(2.0))


def test_a_decoding_step_reads_weights_and_keys_once() -> None:
    """Bytes over bandwidth, counted by hand; a batch that is small enough is bound by memory."""
    machine = Machine(measured=replace(RECORDED, throughput=1e18))
    costs = RooflineCosts(SMALL, machine, vocabulary=1000)
    weights = 512 * 64 * (8 + 2 * 2) + 8 * 64 * 512 + 3 * 512 * 2048
    keys = 200 * 100 * 2 * 2 * 64
    sections = costs.layer(decodes(200, 100), 1.0, 1.0)
    seconds = sum(section.seconds for section in sections)
    assert seconds == pytest.approx(2 * (weights + keys) / RECORDED.bandwidth)
    assert costs.once(decodes(200, 100)) == pytest.approx(2 * 1000 * 512 / RECORDED.bandwidth)


def test_a_prefill_computes_its_products() -> None:
    machine = Machine(measured=replace(RECORDED, bandwidth=1e18))
    rows = 4000
    weights = 512 * 64 * (8 + 2 * 2) + 8 * 64 * 512 + 3 * 512 * 2048
    pairs = rows * (rows + 1) / 2
    step = Step(0, (Batch((Piece(0, rows, rows),)),))
    for share in (1.0, 0.5):  # half of the SMs compute for twice as long
        seconds = sum(x.seconds for x in RooflineCosts(SMALL, machine).layer(step, share, 1.0))
        work = 2 * rows * weights + 4 * pairs * 8 * 64
        assert seconds == pytest.approx(work / RECORDED.throughput / share)


def test_few_sms_read_slower_and_many_as_fast_as_all() -> None:
    machine = Machine(measured=replace(RECORDED, throughput=1e18), sms=100, saturating=60)
    costs, step = RooflineCosts(SMALL, machine), decodes(200, 100)
    shares = 1.0, 0.6, 0.3
    whole, most, half = (costs.layer(step, share, 1.0)[1].seconds for share in shares)
    assert (most, half) == (pytest.approx(whole), pytest.approx(2 * whole))


def test_the_vocabulary_is_computed_for_a_row_of_each_request() -> None:
    machine = Machine(measured=replace(RECORDED, bandwidth=1e18))
    costs = RooflineCosts(SMALL, machine, vocabulary=1000)
    step = Step(0, (Batch((Piece(0, 500, 500), Piece(1, 1, 7))),))
    assert costs.once(step) == pytest.approx(2 * 2 * 1000 * 512 / RECORDED.throughput)


def test_transfers_take_their_bytes_over_the_links() -> None:
    """Sums of two devices; and rows to the experts of four groups, three quarters of them away."""
    machine = Machine(sms=100, link_sms=20)
    chip = machine.chip
    sums = RooflineCosts(SMALL, machine, devices=2).layer(decodes(64, 10), 1.0, 1.0)
    assert [one.name for one in sums] == ["attention", "all-reduce", "MLP", "all-reduce"]
    size = 64 * 512 * 2
    assert sums[1].seconds == pytest.approx(chip.link_latency + size / chip.link_bandwidth)
    experts = replace(SMALL, experts=8, active=2)
    step = Step(0, decodes(64, 10).batches * 4)
    for share, slower in ((1.0, 1), (0.2, 1), (0.1, 2)):
        away = RooflineCosts(experts, machine, groups=4).layer(step, 1.0, share)[1]
        seconds = chip.link_latency + 2 * size * 3 / 4 / chip.link_bandwidth
        assert away.stream == "communication"
        assert away.seconds == pytest.approx(slower * seconds)


def test_drawn_lengths_and_gaps_have_the_means_that_were_asked_for() -> None:
    drawn = synthetic(20_000, rate=5.0, prompt=1000, output=300, spread=0.8)
    assert sum(one.prompt for one in drawn) / 20_000 == pytest.approx(1000, rel=0.03)
    assert sum(one.output for one in drawn) / 20_000 == pytest.approx(300, rel=0.03)
    assert drawn[-1].arrival == pytest.approx(20_000 / 5, rel=0.03)


def test_hosts_plan_as_fast_as_was_measured() -> None:
    costs = RooflineCosts(SMALL, engine=Engine(Line(1e-3, 1e-6), Line(2e-3, 0.0)))
    host = costs.host(decodes(128, 10))
    assert host.schedule == pytest.approx(1e-3 + 128e-6 + REPLAY)
    assert (host.plan, host.output) == (pytest.approx(29.5e-6), pytest.approx(2e-3))
    prompt = Step(0, (Batch((Piece(0, 100, 100),)),))
    assert costs.host(prompt).plan == pytest.approx(RECORDED.mixed_plan(1))


def test_keys_that_move_cost_what_projections_do_not_hide() -> None:
    costs, step = RooflineCosts(SMALL), decodes(8, 100)
    plain = costs.layer(step, 1.0, 1.0)[0].seconds
    assert costs.layer(replace(step, moved=1), 1.0, 1.0)[0].seconds == plain
    assert costs.layer(replace(step, moved=10**6), 1.0, 1.0)[0].seconds > 2 * plain


# --- files ----------------------------------------------------------------------------------------


def test_traces_come_back(tmp_path: Path) -> None:
    given = synthetic(20, rate=3.0, prompt=30, output=5, spread=0.5, handed_over=True)
    write_trace(given, tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl") == given
    (tmp_path / "short.jsonl").write_text('{"arrival": 1, "prompt": 2, "output": 3}\n\n')
    assert read_trace(tmp_path / "short.jsonl") == [Request(1.0, 2, 3)]


def test_timelines_are_written_and_drawn(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    costs = GivenCosts((Section("x", "compute", 1e-3),), plan=1e-3, rows=1)
    ran = simulate([Request(0.0, 1, 5)], costs, DualStreams(), detail=True)
    path = tmp_path / "made" / "trace.json"
    ran.timeline.write(path)
    events = json.loads(path.read_text())["traceEvents"]
    steps = [x for x in events if x["name"].startswith("step")]
    assert [round(x["ts"]) for x in steps] == [1000 + 2000 * i for i in range(5)]
    assert all(x["dur"] == pytest.approx(1000) for x in steps)
    figure, axes = pyplot.subplots()
    draw_timelines({"one": ran.timeline}, ("host", "device"), (0.0, 3e-3), axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one: host", "one: device"]
    assert axes.get_xlim() == (0.0, 3.0)
    pyplot.close(figure)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: GivenCosts((), plan=-1.0), BadCost),
        (lambda: GivenCosts((Section("x", "compute", float("nan")),)), BadCost),
        (lambda: GivenCosts((), layers=0), BadCost),
        (lambda: RooflineCosts(SMALL, devices=0), BadCost),
        (lambda: Engine(Line(-1.0, 0.0)), BadCost),
        (lambda: DualStreams(0.8, 0.3), BadSplit),
        (lambda: DualStreams(1.0, 0.0), BadSplit),
        (lambda: DualStreams(micro_batches=0), BadSetup),
        (lambda: Asynchronous(ahead=0), BadSetup),
        (lambda: Request(-1.0, 1, 1), BadSetup),
        (lambda: Request(0.0, 1, True), BadSetup),
        (lambda: Request(0.0, 4, 1, cached=4), BadSetup),
        (lambda: Limits(requests=9, rows=8), BadSetup),
        (lambda: Deployment(groups=0), BadSetup),
        (lambda: Migration(threshold=0), BadSetup),
        (lambda: Request(0.0, 4, 1, cached=1.5), BadSetup),  # type: ignore[arg-type]
        (lambda: Request(0.0, 4, 1, cached=True), BadSetup),
        (lambda: Request(True, 4, 1), BadSetup),
        (lambda: Serial(ahead=-1), BadSetup),
        (lambda: RooflineCosts(SMALL, spreading="longest"), BadSetup),  # type: ignore[arg-type]
        (lambda: synthetic(1, prompt=0), BadSetup),
        (lambda: synthetic(1, prompt=-5), BadSetup),
        (lambda: synthetic(1, output=0), BadSetup),
        (lambda: synthetic(0), BadSetup),
        (lambda: synthetic(1, rate=0.0), BadSetup),
        (lambda: simulate([], GivenCosts(())), EmptyTrace),
        (lambda: simulate([Request(0.0, 9, 9)], GivenCosts(()), Serial(),
                          limits=Limits(1, 1, kv_tokens=17)), NeverFits),
        (lambda: read_measured("nowhere"), NoMeasurement),
        (lambda: read_trace("nowhere"), NoTrace),
    ],
)  # fmt: skip
def test_mistakes_have_errors_of_their_own(call: Callable[[], Any], error: type) -> None:
    with pytest.raises(error):
        call()


ONE = Request(0.0, 4, 2)
ANY: Any = GivenCosts((Section("x", "compute", 1.0),))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: RooflineCosts("llama"), "model is 'llama'; expected a ModelShape"),  # type: ignore[arg-type]
        (lambda: RooflineCosts(SMALL, "H100"), "machine is 'H100'; expected a Machine"),  # type: ignore[arg-type]
        (lambda: Section("m", "gpu", 1e-3), "'m' is 'gpu'; expected 'compute' or 'comm"),  # type: ignore[arg-type]
        (lambda: GivenCosts((("m", "compute", 1.0),)), "a section is .*Section"),  # type: ignore[arg-type]
        (lambda: GivenCosts(Section("m", "compute", 1.0)), "sections is .*a tuple of"),  # type: ignore[arg-type]
        (lambda: simulate([ONE], ANY, Serial), r"the class Serial; .*write Serial\(\.\.\.\)"),  # type: ignore[arg-type]
        (lambda: simulate([ONE], Serial(), Serial()), "costs is Serial"),  # type: ignore[arg-type]
        (lambda: simulate([(0.0, 4, 2)], ANY), "a request is"),  # type: ignore[list-item]
        (lambda: DualStreams(host=Asynchronous), "host is the class"),  # type: ignore[arg-type]
        (lambda: Deployment(placement=LeastTokens), "placement is the class"),  # type: ignore[arg-type]
        (lambda: simulate([ONE], ANY, DualStreams()), "rows of GivenCosts is None; .* or 0"),
        (lambda: Limits(requests=8, rows=2), "rows is 2; .*8, one for each of requests=8"),
        (lambda: RooflineCosts(replace(SMALL, layers=0)), "layers of small is 0"),
        (lambda: RooflineCosts(replace(SMALL, heads=3)), "heads of small is 3; .*kv_heads=2"),
        (lambda: RooflineCosts(replace(SMALL, active=2)), "active of small is 2; .*experts=1"),
        (lambda: simulate([ONE], ANY).ttft(50), "quantile is 50; .* from 0 to 1"),
        (lambda: simulate([ONE], ANY).tpot(-1), "quantile is -1"),
        (lambda: simulate([ONE], ANY).idle("gpu"), "resource is 'gpu'; .*'host' or 'dev"),
    ],
)  # fmt: skip
def test_arguments_of_another_kind_are_told_where_they_are_given(
    call: Callable[[], Any], told: str
) -> None:
    with pytest.raises(BadSetup, match=told):
        call()


@pytest.mark.parametrize(
    ("line", "error", "told"),
    [
        ('{"arrival": 0, "prompt": 1, "ouput": 2}', UnknownTraceField, "output"),
        ('{"arrival": 0, "prompt": 1}', BadTraceLine, "output missing"),
        ('{"arrival": 0, "prompt": 0, "output": 2}', BadTraceLine, "prompt is 0"),
        ('{"arrival": "x", "prompt": 1, "output": 2}', BadTraceLine, "line 2"),
        ('{"arrival": true, "prompt": 4, "output": 2}', BadTraceLine, "arrival is True"),
        ('{"arrival": "1", "prompt": 4, "output": 2}', BadTraceLine, "line 2"),
        ('{"arrival": 0, "prompt": 4, "output": 2, "cached": 1.5}', BadTraceLine, "cached is 1.5"),
        (
            '{"arrival": 0, "prompt": 4, "output": 2, "cached": true}',
            BadTraceLine,
            "cached is True",
        ),
        ('{"arrival": 0, "prompt": 4, "output": 2, "cached": "a"}', BadTraceLine, "cached is a"),
        ("[1]", BadTraceLine, "no object"),
        ("{", BadTraceLine, "no JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, error: type, told: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "prompt": 1, "output": 2}\n' + line)
    with pytest.raises(error, match=told) as raised:
        read_trace(path)
    assert "trace.jsonl, line 2" in str(raised.value)
    path.write_text("\n")
    with pytest.raises(EmptyTrace):
        read_trace(path)


@pytest.mark.parametrize(("rows", "seconds"), [(0, 5.0), (4, 2.5)])
def test_halves_of_a_step_cost_what_rows_says(rows: int, seconds: float) -> None:
    parts = Section("c", "compute", 2.0), Section("t", "communication", 1.0)
    requests = [Request(0.0, 1, 1)] * 4
    limits = Limits(4, 4)
    ran = simulate(requests, GivenCosts(parts, rows=rows), DualStreams(), limits=limits)
    assert ran.seconds == pytest.approx(seconds)
    whole = DualStreams(micro_batches=1)
    assert simulate(requests, GivenCosts(parts), whole, limits=limits).seconds == 3.0


def test_a_schedule_that_serves_nobody_is_noticed() -> None:
    class Stuck(Asynchronous):
        def __post_init__(self) -> None:
            object.__setattr__(self, "ahead", -1)

    with pytest.raises(AssertionError, match="left 1 of 1 requests"):
        simulate([Request(0.0, 4, 1)], GivenCosts(()), Stuck())
