"""One engine: a host that plans and reads, and a device that computes, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from warploom.serving.simulation.balance import Migration
from warploom.serving.simulation.batcher import Batcher, Limits, Served
from warploom.serving.simulation.clock import Clock, Resource
from warploom.serving.simulation.costs import STREAMS, Costs
from warploom.serving.simulation.schedules import Schedule, lay_out
from warploom.serving.simulation.steps import Piece, Step, spread
from warploom.serving.simulation.timeline import Timeline


@dataclass
class Log:
    """What all engines have done.

    Attributes:
        timeline: of their resources.
        steps: that were computed.
        wasted: rows behind the end of a request.
        moved: requests that changed their group.
        spreads: tokens by which groups differed, added up over steps.
        streams: seconds in which each stream of a device computed.
        detail: whether the streams' tasks are kept in the timeline.
    """

    timeline: Timeline = field(default_factory=Timeline)
    steps: int = 0
    wasted: int = 0
    moved: int = 0
    spreads: int = 0
    streams: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0.0))
    detail: bool = False


class Engine:
    """Runs steps as long as there is something to compute.

    A plan is made of what the host knows when it begins to plan: tokens of the step under way count
    as there, and ends that only tokens tell are not known.
    """

    def __init__(
        self, clock: Clock, name: str, schedule: Schedule, costs: Costs, groups: Sequence[Batcher],
        log: Log, migration: Migration | None = None,
    ) -> None:  # fmt: skip
        self.groups = groups
        self._clock, self._name, self._log = clock, name, log
        self._schedule, self._costs, self._migration = schedule, costs, migration
        self._host = Resource(clock, log.timeline, f"{name}/host")
        self._device = Resource(clock, log.timeline, f"{name}/device")
        self._served: dict[int, Served] = {}
        self._is_planning = False
        self._under_way = 0  # steps that are planned and not computed
        self._numbers = 0

    @classmethod
    def with_groups(
        cls, clock: Clock, name: str, schedule: Schedule, costs: Costs, count: int,
        limits: Limits, log: Log, migration: Migration | None,
    ) -> Engine:  # fmt: skip
        groups = [Batcher(limits) for _ in range(count)]
        return cls(clock, name, schedule, costs, groups, log, migration)

    def arrive(self, served: Served) -> None:
        """A request for the group that it says."""
        self._served[served.number] = served
        self.groups[served.group].add(served)
        # behind all that arrive at the same time, so that the first of them is not planned alone
        self._clock.at(self._clock.now, self._wake)

    def _wake(self) -> None:
        """Ask the host for the next plan, if it may make one, behind what it has to read."""
        if self._is_planning or self._under_way > self._schedule.ahead:
            return
        self._is_planning = True
        made: list[Step] = []

        def begin() -> tuple[str, float] | None:
            step = self._form()
            if step is None:
                return None
            made.append(step)
            self._under_way += 1
            return f"plan {step.number}", self._schedule.before(self._costs, step)

        def done() -> None:
            self._is_planning = False
            if made:
                self._compute(made[0])
                self._wake()

        self._host.submit(begin, done)

    def _form(self) -> Step | None:
        moved = 0
        if self._migration is not None:
            one = self._migration.move(self.groups)
            if one is not None:
                moved, self._log.moved = one.keys, self._log.moved + 1
        batches = tuple(group.form(self._schedule.knows_ends) for group in self.groups)
        if not any(batch.rows for batch in batches):
            return None
        step = Step(self._numbers, batches, moved)
        self._numbers += 1
        self._log.spreads += spread(batches)
        return step

    def _compute(self, step: Step) -> None:
        tasks = self._schedule.tasks(self._costs, step)
        times = lay_out(tasks)

        def begin() -> tuple[str, float]:
            for task, (since, until) in zip(tasks, times, strict=True):
                self._log.streams[task.stream] += task.seconds
                if self._log.detail:
                    at = self._clock.now
                    lane = f"{self._name}/{task.stream}"
                    self._log.timeline.add(lane, task.name, at + since, at + until)
            return f"step {step.number}", max(end for _, end in times)

        def done() -> None:
            self._under_way -= 1
            self._log.steps += 1
            self._read(step)
            self._wake()

        self._device.submit(begin, done)

    def _read(self, step: Step) -> None:
        def done() -> None:
            for batch in step.batches:
                for piece in batch.pieces:
                    self._see(piece)
            self._wake()

        seconds = self._schedule.after(self._costs, step)
        self._host.submit(lambda: (f"read {step.number}", seconds), done)

    def _see(self, piece: Piece) -> None:
        if not piece.emits:
            # chunks of a prompt emit nothing either, but belong to a request that goes on
            served = self._served[piece.request]
            self._log.wasted += served.seen >= served.request.output
            return
        served = self._served[piece.request]
        if served.seen == 0:
            served.first = self._clock.now
        if self.groups[served.group].see(served):
            served.last = self._clock.now
