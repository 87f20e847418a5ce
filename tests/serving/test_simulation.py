"""Simulated engines against closed forms: schedules in steady state, streams, queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.serving.simulation.costs import Stream
from warploom.serving.simulation.schedules import Task, lay_out
from warploom.serving.simulation.steps import Step
from warploom.simulate import (
    Asynchronous,
    Deployment,
    DualStreams,
    GivenCosts,
    Hashed,
    LeastRequests,
    Limits,
    Placement,
    Request,
    Result,
    RoundRobin,
    Schedule,
    Section,
    Serial,
    simulate,
    synthetic,
)

ONE = Limits(requests=1, rows=1)
times = st.floats(1e-4, 1.0)


def steps(costs: GivenCosts, schedule: Schedule, count: int) -> Result:
    """One request that decodes, a token for each step."""
    return simulate([Request(0.0, 2, count, cached=1)], costs, schedule, limits=ONE)


@given(times, times, times, times)
@settings(max_examples=30)
def test_in_turn_a_step_takes_the_sum_of_its_parts(
    schedule: float, plan: float, device: float, output: float
) -> None:
    costs = GivenCosts((Section("x", "compute", device),), schedule, plan, output)
    found = steps(costs, Serial(), 20)
    assert found.seconds == pytest.approx(20 * (schedule + plan + device + output))
    assert found.idle("device") == pytest.approx(1 - 20 * device / found.seconds)


@given(times, times, times, times, times, st.booleans())
@settings(max_examples=40)
def test_a_step_ahead_takes_the_longer_of_host_and_device(
    schedule: float, plan: float, output: float, device: float, swap: float, by_device: bool
) -> None:
    """The difference of two runs, so that neither the first plan nor the last read counts."""
    costs = GivenCosts(
        (Section("x", "compute", device),), schedule, plan, output,
        planner_kernel=0.3 * plan, swap_kernel=swap,
    )  # fmt: skip
    ahead = Asynchronous(by_device, knows_ends=True)
    longer, shorter = (steps(costs, ahead, count).seconds for count in (60, 20))
    host = schedule + output + (0.0 if by_device else plan)
    on_device = device + swap + (0.3 * plan if by_device else 0.0)
    assert (longer - shorter) / 40 == pytest.approx(max(host, on_device), rel=1e-6)


def test_ends_that_only_tokens_tell_cost_one_row_each() -> None:
    costs = GivenCosts((Section("x", "compute", 1.0),), plan=0.1)
    known = steps(costs, Asynchronous(knows_ends=True), 7)
    told = steps(costs, Asynchronous(), 7)
    assert (known.log.steps, known.log.wasted) == (7, 0)
    assert (told.log.steps, told.log.wasted) == (8, 1)
    assert steps(costs, Serial(), 7).log.steps == 7
    # the row for nothing comes when all is over, and counts as no work
    assert told.idle("device") == pytest.approx(0.1 / told.seconds) and told.seconds < 7.2


@given(times, times, st.integers(1, 9))
@settings(max_examples=40)
def test_two_micro_batches_hide_the_shorter_stream(
    compute: float, communication: float, layers: int
) -> None:
    """What cannot be hidden is the other stream's share of the first or the last micro-batch."""
    parts = Section("c", "compute", 2 * compute), Section("m", "communication", 2 * communication)
    costs = GivenCosts(parts, layers=layers, rows=2)
    requests = [Request(0.0, 2, 1, cached=1)] * 2
    one, two = (
        simulate(requests, costs, schedule, limits=Limits(2, 2)).seconds
        for schedule in (Serial(), DualStreams(0.5, 0.5))
    )
    assert one == pytest.approx(2 * layers * (compute + communication))
    longer, shorter = max(compute, communication), min(compute, communication)
    assert two == pytest.approx(2 * layers * longer + shorter)


streams: st.SearchStrategy[Stream] = st.sampled_from(("compute", "communication"))


@given(st.lists(st.tuples(streams, times, st.integers(0, 20)), min_size=1, max_size=12))
@settings(max_examples=40)
def test_streams_run_in_order_and_lose_nothing(drawn: list[tuple[Stream, float, int]]) -> None:
    tasks = [
        Task(str(i), stream, seconds, after % i if i and after else None)
        for i, (stream, seconds, after) in enumerate(drawn)
    ]
    found = lay_out(tasks)
    for i, (task, (begin, end)) in enumerate(zip(tasks, found, strict=True)):
        assert end - begin == pytest.approx(task.seconds)
        before = [found[k][1] for k in range(i) if tasks[k].stream == task.stream]
        needed = [] if task.after is None else [found[task.after][1]]
        assert begin == max([0.0, *before, *needed])  # as early as it may be
    whole = max(end for _, end in found)
    sums = [sum(x.seconds for x in tasks if x.stream == name) for name in {t.stream for t in tasks}]
    assert max(sums) - 1e-9 <= whole <= sum(sums) + 1e-9


# --- queues ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnCosts(GivenCosts):
    """Steps whose seconds were drawn; on the device alone."""

    drawn: tuple[float, ...] = ()

    def layer(self, step: Step, compute: float, communication: float) -> Sequence[Section]:
        return (Section("x", "compute", self.drawn[step.number]),)


def queue(load: float, count: int, drawn: Sequence[float] = ()) -> Result:
    """Requests of one step each, of a second in the mean."""
    fixed = GivenCosts((Section("x", "compute", 1.0),))
    costs = DrawnCosts((), drawn=tuple(drawn)) if len(drawn) else fixed
    requests = synthetic(count, rate=load, prompt=1, output=1, seed=3)
    return simulate(requests, costs, Serial(), limits=ONE)


def waiting(found: Result, of_service: float = 1.0) -> float:
    """Mean seconds between the arrival and the step."""
    spans = [one.first - one.request.arrival for one in found.served]
    return float(np.mean(spans)) - of_service


def starts(arrivals: Sequence[float], servers: int) -> list[float]:
    """When one second of each begins, first come, first served (Kiefer and Wolfowitz)."""
    free = [0.0] * servers
    found = []
    for arrival in arrivals:
        begin = max(arrival, free[0])
        heapreplace(free, begin + 1.0)
        found.append(begin)
    return found


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_fixed_step_waits_as_m_d_1_does(load: float) -> None:
    found = queue(load, 15_000)  # whose mean is good to 3 %
    truth = starts([one.request.arrival for one in found.served], 1)
    assert [one.first - 1.0 for one in found.served] == pytest.approx(truth)
    assert waiting(found) == pytest.approx(load / (2 * (1 - load)), rel=0.08)
    assert found.idle("device") == pytest.approx(1 - load, abs=0.02)


def test_a_drawn_step_waits_as_m_m_1_does() -> None:
    drawn = np.random.default_rng(5).exponential(1.0, 15_000)
    found = queue(0.5, len(drawn), drawn.tolist())
    assert waiting(found, float(drawn.mean())) == pytest.approx(0.5 / (1 - 0.5), rel=0.08)
    # the whole time is exponential: half of the requests are through in ln 2 / (1 - 0.5)
    assert found.ttft() == pytest.approx(np.log(2) / 0.5, rel=0.08)


def test_placements_wait_as_their_queues_do() -> None:
    """By a hash an engine is an M/D/1 queue of its own. In turn they are one M/D/3 queue, for steps
    of one length are done in the order in which they came: no placement waits less."""
    load, engines = 0.7, 3
    requests = synthetic(6_000, rate=load * engines, prompt=1, output=1, seed=8)
    costs = GivenCosts((Section("x", "compute", 1.0),))

    def served(placement: Placement) -> Result:
        deployment = Deployment(replicas=engines, placement=placement)
        return simulate(requests, costs, limits=ONE, deployment=deployment)

    hashed, in_turn, by_load = (served(x) for x in (Hashed(), RoundRobin(), LeastRequests()))
    truth = starts([one.arrival for one in requests], engines)
    assert [one.first - 1.0 for one in in_turn.served] == pytest.approx(truth)
    assert waiting(hashed) == pytest.approx(load / (2 * (1 - load)), rel=0.12)
    assert waiting(in_turn) <= waiting(by_load) < 0.5 * waiting(hashed)


def test_seconds_scale_with_all_of_their_causes() -> None:
    """Powers of two change no rounding: everything is exactly twice as long."""
    parts = Section("c", "compute", 0.3), Section("m", "communication", 0.2)
    costs = GivenCosts(parts, 0.01, 0.02, 0.03, 0.004, 0.005, 0.06, layers=3, rows=8)
    slow = GivenCosts(
        tuple(replace(part, seconds=2 * part.seconds) for part in parts), 0.02, 0.04, 0.06, 0.008,
        0.01, 0.12, layers=3, rows=8,
    )  # fmt: skip
    requests = synthetic(30, rate=2.0, prompt=20, output=6, spread=0.7)
    late = [replace(one, arrival=2 * one.arrival) for one in requests]
    schedule = DualStreams(host=Asynchronous(device_planner=True))
    limits = Limits(8, 32)
    found, twice = simulate(requests, costs, schedule, limits=limits), simulate(
        late, slow, schedule, limits=limits
    )  # fmt: skip
    assert twice.seconds == 2 * found.seconds
    assert [x.last for x in twice.served] == [2 * x.last for x in found.served]
