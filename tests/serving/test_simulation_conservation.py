"""Whatever the schedule and the placement, every token is computed once, and nothing is overrun."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.serving.simulation.balance import Migration
from warploom.serving.simulation.batcher import Batcher, Served
from warploom.serving.simulation.cores import heaviest
from warploom.serving.simulation.steps import Batch, Piece, Step, cut
from warploom.simulate import (
    Asynchronous,
    Deployment,
    DualStreams,
    GivenCosts,
    Hashed,
    LeastRequests,
    LeastTokens,
    Limits,
    Request,
    Result,
    RoundRobin,
    Schedule,
    Section,
    Serial,
    simulate,
)

PARTS = Section("c", "compute", 0.1), Section("m", "communication", 0.05)


@dataclass(frozen=True)
class SeenCosts(GivenCosts):
    """That remember which steps they were asked about."""

    seen: list[Step] = field(default_factory=list)

    def once(self, step: Step) -> float:
        self.seen.append(step)
        return super().once(step)


requests = st.lists(
    st.builds(
        lambda arrival, prompt, output, cached: Request(
            arrival, prompt, output, min(cached, prompt - 1)
        ),
        st.floats(0, 3), st.integers(1, 40), st.integers(1, 8), st.integers(0, 40),
    ),
    min_size=1, max_size=12,
)  # fmt: skip
schedules: st.SearchStrategy[Schedule] = st.sampled_from(
    (
        Serial(),
        Asynchronous(),
        Asynchronous(device_planner=True, ahead=2),
        Asynchronous(knows_ends=True),
        DualStreams(),
        DualStreams(micro_batches=3, host=Asynchronous()),
    )
)
deployments = st.builds(
    Deployment,
    replicas=st.integers(1, 2),
    groups=st.integers(1, 3),
    placement=st.sampled_from((RoundRobin(), Hashed(), LeastRequests(), LeastTokens())),
    migration=st.sampled_from((None, Migration(threshold=5))),
)
LIMITS = Limits(requests=3, rows=16, kv_tokens=60)


def run(
    given: Sequence[Request], schedule: Schedule, deployment: Deployment
) -> tuple[Result, list[Step]]:
    costs = SeenCosts(PARTS, 0.01, 0.02, 0.03, 0.004, 0.005, 0.006, layers=2, rows=16)
    found = simulate(given, costs, schedule, limits=LIMITS, deployment=deployment)
    return found, costs.seen


@given(requests, schedules, deployments)
@settings(max_examples=40)
def test_tokens_are_computed_once(
    given: list[Request], schedule: Schedule, deployment: Deployment
) -> None:
    found, steps = run(given, schedule, deployment)
    rows, emitted = Counter[int](), Counter[int]()
    for piece in (piece for step in steps for batch in step.batches for piece in batch.pieces):
        rows[piece.request] += piece.rows
        emitted[piece.request] += piece.emits
    for one in found.served:
        due = one.request.prompt - one.request.cached + one.request.output - 1
        assert emitted[one.number] == one.seen == one.request.output
        rows[one.number] -= due
        assert one.request.arrival < one.first <= one.last <= found.seconds
    assert min(rows.values()) >= 0 and rows.total() == found.log.wasted
    if schedule.knows_ends:
        assert found.log.wasted == 0
    assert found.tokens == sum(one.output for one in given)
    assert len(steps) == found.log.steps


@given(requests, schedules, deployments)
@settings(max_examples=25)
def test_limits_hold_and_resources_do_one_thing_at_a_time(
    given: list[Request], schedule: Schedule, deployment: Deployment
) -> None:
    found, steps = run(given, schedule, deployment)
    for step in steps:
        assert len(step.batches) == deployment.groups and step.rows
        for batch in step.batches:
            assert batch.rows <= LIMITS.rows and len(batch.pieces) <= LIMITS.requests
            assert batch.keys <= LIMITS.kv_tokens
    assert found.timeline.overlaps() == []
    for resource in ("host", "device"):
        assert -1e-9 < found.idle(resource) < 1
    again, _ = run(given, schedule, deployment)
    assert again.seconds == found.seconds and again.log.moved == found.log.moved


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), max_size=8), st.integers(1, 4))
@settings(max_examples=40)
def test_micro_batches_are_the_batch(drawn: list[tuple[int, int]], parts: int) -> None:
    batch = Batch(tuple(Piece(i, n, n + before) for i, (n, before) in enumerate(drawn)))
    found = cut(batch, parts)
    assert max(x.rows for x in found) - min(x.rows for x in found) <= 1
    assert sum(x.rows for x in found) == batch.rows
    assert sum(x.pairs for x in found) == batch.pairs  # multiples of a half are exact
    assert sum(p.emits for x in found for p in x.pieces) == len(drawn)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=40)
def test_cores_get_no_more_than_they_must(keys: list[int], cores: int) -> None:
    """Against all assignments; the longest first is within Graham's 4/3 of the best of them."""
    assignments = np.indices((cores,) * len(keys)).reshape(len(keys), -1)
    loads = [(np.array(keys)[:, None] * (assignments == core)).sum(0) for core in range(cores)]
    best = int(np.max(loads, axis=0).min())
    in_turn, whole, parts = (
        heaviest(keys, cores, how) for how in ("in turn", "longest first", "cut")
    )
    assert best <= whole <= best * (4 / 3 - 1 / (3 * cores)) + 1e-9
    assert best <= in_turn and sum(keys) / cores <= parts <= whole


@given(st.lists(st.lists(st.integers(1, 50), max_size=5), min_size=2, max_size=4))
@settings(max_examples=40)
def test_a_migration_evens_two_groups_out(drawn: list[list[int]]) -> None:
    groups, number = [Batcher(replace(LIMITS, requests=6, kv_tokens=10_000)) for _ in drawn], 0
    for group, lengths in zip(groups, drawn, strict=True):
        for length in lengths:
            group.enter(Served(number, Request(0.0, length, 9), read=length))
            number += 1

    def keys() -> list[int]:
        return [sum(one.keys for one in group.running.values()) for group in groups]

    before = keys()
    moved = Migration(threshold=5).move(groups)
    after = keys()
    assert sum(after) == sum(before)
    if moved is None:
        assert after == before
    else:
        assert max(before) - min(before) >= 5
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert len(changed) == 2 and moved.number in groups[moved.group].running
        spans = [abs(x[changed[0]] - x[changed[1]]) for x in (before, after)]
        assert spans[1] < spans[0]


def test_a_request_as_large_as_the_gap_stays() -> None:
    """It would only turn the two groups around."""
    groups = [Batcher(LIMITS), Batcher(LIMITS)]
    groups[0].enter(Served(0, Request(0.0, 40, 9), read=40))
    assert Migration(threshold=5).move(groups) is None
    groups[0].enter(Served(1, Request(0.0, 9, 1), read=9))
    moved = Migration(threshold=5).move(groups)
    assert moved is not None and moved.number == 0 and moved.group == 1


def test_a_request_that_has_nothing_left_to_compute_stays() -> None:
    groups = [Batcher(LIMITS), Batcher(LIMITS)]
    groups[0].enter(Served(0, Request(0.0, 20, 3), read=20, planned=3))  # its end is not seen yet
    groups[0].enter(Served(1, Request(0.0, 30, 3), read=30, planned=2))
    moved = Migration(threshold=5).move(groups)
    assert moved is not None and moved.number == 1
    assert Migration(threshold=5).move(groups) is None
