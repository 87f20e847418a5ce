"""A run of requests under a schedule, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from warploom.serving.simulation.arrivals import Request
from warploom.serving.simulation.balance import Migration, Placement, RoundRobin
from warploom.serving.simulation.batcher import Limits, Served
from warploom.serving.simulation.checks import check_kind, check_quantile
from warploom.serving.simulation.clock import Clock
from warploom.serving.simulation.costs import ASKED, Costs, GivenCosts
from warploom.serving.simulation.engine import Engine, Log
from warploom.serving.simulation.schedules import DualStreams, Schedule, Serial, check_schedule
from warploom.serving.simulation.timeline import Timeline
from warploom.simulation_errors import BadSetup, EmptyTrace


@dataclass(frozen=True)
class Deployment:
    """Where requests may go.

    Attributes:
        replicas: engines that know nothing of each other.
        groups: data-parallel groups of each, which compute in step.
        placement: of a request that arrives, over the groups of all engines.
        migration: between the groups of an engine; None: a request stays.

    Raises:
        BadSetup: fewer than one replica or group; a placement or migration that is none.
    """

    replicas: int = 1
    groups: int = 1
    placement: Placement = field(default_factory=RoundRobin)
    migration: Migration | None = None

    def __post_init__(self) -> None:
        for name in ("replicas", "groups"):
            if getattr(self, name) < 1:
                raise BadSetup(name=name, got=getattr(self, name), expected="at least 1")
        check_kind("placement", self.placement, ("choose",), "a placement, such as LeastTokens()")
        if self.migration is not None:
            check_kind("migration", self.migration, Migration, "a Migration(threshold), or None")


@dataclass(frozen=True)
class Result:
    """What came of a run; times are seconds.

    Attributes:
        schedule: its name.
        served: the requests in the order of their arrival, with their times.
        seconds: until the last token was read.
        log: what engines and resources did.
        replicas: engines.
    """

    schedule: str
    served: Sequence[Served]
    seconds: float
    log: Log
    replicas: int

    @property
    def timeline(self) -> Timeline:
        return self.log.timeline

    @property
    def tokens(self) -> int:
        """That were put out."""
        return sum(one.seen for one in self.served)

    @property
    def throughput(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def ttft(self, quantile: float = 0.5) -> float:
        """From a request's arrival to its first token; raises BadSetup for no quantile."""
        check_quantile(quantile)
        return float(
            np.quantile([one.first - one.request.arrival for one in self.served], quantile)
        )

    def tpot(self, quantile: float = 0.5) -> float:
        """Between tokens of a request, its mean; 0 where nobody has two.

        Raises:
            BadSetup: no quantile.
        """
        check_quantile(quantile)
        found = [
            (one.last - one.first) / (one.request.output - 1)
            for one in self.served
            if one.request.output > 1
        ]
        return float(np.quantile(found, quantile)) if found else 0.0

    def idle(self, resource: str) -> float:
        """Part of the time in which "host" or "device" had nothing to do, the mean of engines.

        Raises:
            BadSetup: no such resource.
        """
        if resource not in ("host", "device"):
            raise BadSetup(name="resource", got=repr(resource), expected="'host' or 'device'")
        lanes = [f"engine {i}/{resource}" for i in range(self.replicas)]
        # rows behind the last end of a request are computed when all is over
        busy = sum(self.timeline.busy(lane, self.seconds) for lane in lanes)
        return 1 - busy / (self.replicas * self.seconds) if self.seconds else 0.0

    @property
    def spread(self) -> float:
        """Tokens by which the fullest and the emptiest group differ, the mean of steps."""
        return self.log.spreads / self.log.steps

    @property
    def exposed(self) -> float:
        """Seconds of a device in which it computed nothing though a step was under way."""
        steps = sum(self.timeline.busy(f"engine {i}/device") for i in range(self.replicas))
        return steps - self.log.streams["compute"]


def simulate(
    requests: Sequence[Request],
    costs: Costs,
    schedule: Schedule | None = None,
    *,
    limits: Limits | None = None,
    deployment: Deployment | None = None,
    detail: bool = False,
) -> Result:
    """Serve all requests, and look when.

    The same arguments give the same result: nothing is drawn here.

    Args:
        requests: to be served, in any order.
        costs: of a step.
        schedule: of each engine; `Serial` by default.
        limits: of a group.
        deployment: engines and groups; one of one by default.
        detail: keep the tasks of both streams in the timeline, many for each step.

    Raises:
        EmptyTrace: no request.
        NeverFits: a request that is larger than a group's cache.
        BadSetup: an argument of another kind, such as the class of a schedule; or `DualStreams`
            with `GivenCosts` whose `rows` are not told.
    """
    if not requests:
        raise EmptyTrace(where="the list of requests")
    schedule, limits = schedule or Serial(), limits or Limits()
    deployment = deployment or Deployment()
    _check(requests, costs, schedule, limits, deployment)
    clock, log = Clock(), Log(detail=detail)
    engines = [
        Engine.with_groups(
            clock, f"engine {i}", schedule, costs, deployment.groups, limits, log,
            deployment.migration,
        )
        for i in range(deployment.replicas)
    ]  # fmt: skip
    ordered = sorted(requests, key=lambda one: one.arrival)
    served = [Served(number, one, read=one.cached) for number, one in enumerate(ordered)]
    for one in served:
        clock.at(one.request.arrival, partial(_place, one, engines, deployment.placement))
    clock.run()
    left = sum(one.seen < one.request.output for one in served)
    assert not left, f"{schedule.name} left {left} of {len(served)} requests unserved"
    return Result(
        schedule.name, served, max(one.last for one in served), log, deployment.replicas
    )  # fmt: skip


def _check(
    requests: Sequence[Request], costs: Costs, schedule: Schedule, limits: Limits,
    deployment: Deployment,
) -> None:  # fmt: skip
    for one in requests:
        check_kind("a request", one, Request, "Request(arrival, prompt, output)")
    check_kind("costs", costs, ASKED, "costs, such as GivenCosts(...) or RooflineCosts(model)")
    check_schedule("schedule", schedule)
    check_kind("limits", limits, Limits, "Limits(...), or None")
    if isinstance(schedule, DualStreams) and schedule.micro_batches > 1:
        _check_rows(costs)
    check_kind("deployment", deployment, Deployment, "Deployment(...), or None")


def _check_rows(costs: Costs) -> None:
    """Raise BadSetup for costs that do not say what part of a step takes."""
    if isinstance(costs, GivenCosts) and costs.rows is None:
        expected = (
            "the rows of a step that the sections hold for, since DualStreams cuts steps; or 0, "
            "where each micro-batch takes as long as the whole step"
        )
        raise BadSetup(name="rows of GivenCosts", got=None, expected=expected)


def _place(served: Served, engines: Sequence[Engine], placement: Placement) -> None:
    groups = [group for engine in engines for group in engine.groups]
    chosen = placement.choose(served.number, groups)
    engine, served.group = divmod(chosen, len(engines[0].groups))
    engines[engine].arrive(served)
