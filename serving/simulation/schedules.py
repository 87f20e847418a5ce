"""Schedules: how far the host is ahead, and which streams a step's layers take.

After xLLM, section 4.1 (figure 7). Each is a small object; `simulate` asks it about every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from warploom.serving.simulation.checks import check_kind
from warploom.serving.simulation.costs import STREAMS, Costs, Stream
from warploom.serving.simulation.steps import Step
from warploom.simulation_errors import BadSetup, BadSplit


class Task(NamedTuple):
    """Part of a step.

    Attributes:
        name: of it.
        stream: that it runs on, behind what was given to that stream before.
        seconds: that it takes.
        after: index of the task that it waits for; None: it may begin with the step.
    """

    name: str
    stream: Stream
    seconds: float
    after: int | None


class Schedule(Protocol):
    """What `simulate` asks.

    Attributes:
        name: for tables.
        ahead: steps that may be under way on the device, or wait for it, while the host prepares
            one more.
        knows_ends: whether ends of requests are known when their last token is planned.
    """

    @property
    def name(self) -> str: ...
    @property
    def ahead(self) -> int: ...
    @property
    def knows_ends(self) -> bool: ...

    def before(self, costs: Costs, step: Step) -> float:
        """Seconds of the host before the device can begin."""
        ...

    def after(self, costs: Costs, step: Step) -> float:
        """Seconds of the host when the step is done."""
        ...

    def first(self, costs: Costs, step: Step) -> Sequence[Task]:
        """What the device does before the layers: tokens for placeholders, a plan."""
        ...

    def tasks(self, costs: Costs, step: Step) -> Sequence[Task]:
        """All that the device does, in the order in which it is given to the streams."""
        ...


def check_schedule(name: str, got: object) -> None:
    """Raise BadSetup for what is no schedule, such as the class of one."""
    asked = ("name", "ahead", "knows_ends", "before", "after", "first", "tasks")
    check_kind(name, got, asked, "a schedule, such as Serial() or Asynchronous()")


@dataclass(frozen=True)
class Serial:
    """Plan, compute, read the tokens, and only then plan again.

    Raises:
        BadSetup: `ahead` is negative, so that no step would ever be planned.
    """

    name: str = "serial"
    ahead: int = 0
    knows_ends: bool = True

    def __post_init__(self) -> None:
        if self.ahead < 0:
            raise BadSetup(name="ahead", got=self.ahead, expected="a number of steps from 0 on")

    def before(self, costs: Costs, step: Step) -> float:
        host = costs.host(step)
        return host.schedule + host.plan

    def after(self, costs: Costs, step: Step) -> float:
        return costs.host(step).output

    def first(self, costs: Costs, step: Step) -> Sequence[Task]:
        return ()

    def tasks(self, costs: Costs, step: Step) -> Sequence[Task]:
        return _in_sequence(self.first(costs, step), costs, step)


@dataclass(frozen=True)
class Asynchronous:
    """The host prepares step n + 1 during step n, with placeholders for its tokens.

    On the device the tokens replace them before the step begins. An end that only the tokens tell
    is seen a step too late, and one row is computed for nothing.

    Attributes:
        device_planner: attention is planned by a kernel from lengths on the device.
        ahead: steps.
        knows_ends: for requests that end by their length alone.
    """

    device_planner: bool = False
    ahead: int = 1
    knows_ends: bool = False

    def __post_init__(self) -> None:
        if self.ahead < 1:
            raise BadSetup(name="ahead", got=self.ahead, expected="at least one step")

    @property
    def name(self) -> str:
        return "asynchronous, device planner" if self.device_planner else "asynchronous"

    def before(self, costs: Costs, step: Step) -> float:
        host = costs.host(step)
        return host.schedule if self.device_planner else host.schedule + host.plan

    def after(self, costs: Costs, step: Step) -> float:
        return costs.host(step).output

    def first(self, costs: Costs, step: Step) -> Sequence[Task]:
        found: list[Task] = []
        _append(found, "swap", "compute", costs.swap(step))
        if self.device_planner:
            _append(found, "plan", "compute", costs.planner(step))
        return found

    def tasks(self, costs: Costs, step: Step) -> Sequence[Task]:
        return _in_sequence(self.first(costs, step), costs, step)


@dataclass(frozen=True)
class DualStreams:
    """Micro-batches whose communication runs beside the computation of others (xLLM, figure 7).

    The host schedules as `host` does. A kernel's share of the SMs is its wrapper's `sm_limit`.

    Attributes:
        compute, communication: share of the SMs that each stream has.
        micro_batches: of a step.
        host: the schedule of the host.

    Raises:
        BadSplit: a share is none, or both are more than there is.
        BadSetup: fewer than one micro-batch, or a host that is no schedule.
    """

    compute: float = 0.84
    communication: float = 0.16
    micro_batches: int = 2
    host: Schedule = Serial()

    def __post_init__(self) -> None:
        shares = self.compute, self.communication
        # sums of decimal shares miss 1 by a rounding
        if not all(share > 0 for share in shares) or not sum(shares) <= 1 + 1e-9:
            shown = " and ".join(f"{100 * share:g} %" for share in shares)
            raise BadSplit(shares=shown, total=f"{100 * sum(shares):g} %")
        if self.micro_batches < 1:
            raise BadSetup(name="micro_batches", got=self.micro_batches, expected="at least 1")
        check_schedule("host", self.host)

    @property
    def name(self) -> str:
        return f"{self.host.name}, dual streams"

    @property
    def ahead(self) -> int:
        return self.host.ahead

    @property
    def knows_ends(self) -> bool:
        return self.host.knows_ends

    def before(self, costs: Costs, step: Step) -> float:
        return self.host.before(costs, step)

    def after(self, costs: Costs, step: Step) -> float:
        return self.host.after(costs, step)

    def first(self, costs: Costs, step: Step) -> Sequence[Task]:
        return self.host.first(costs, step)

    def tasks(self, costs: Costs, step: Step) -> Sequence[Task]:
        parts = [
            costs.layer(one, self.compute, self.communication)
            for one in step.micro(self.micro_batches)
        ]
        found = list(self.first(costs, step))
        ends: list[int | None] = [len(found) - 1 if found else None] * len(parts)
        for _ in range(costs.layers):
            for sections in zip(*parts, strict=True):
                for number, part in enumerate(sections):
                    name = f"{part.name} {chr(ord('a') + number)}"
                    found.append(Task(name, part.stream, part.seconds, ends[number]))
                    ends[number] = len(found) - 1
        _append(found, "last", "compute", costs.once(step))
        return found


def _in_sequence(first: Sequence[Task], costs: Costs, step: Step) -> list[Task]:
    """One part after another; the layers are alike, so that each part stands for all."""
    found = list(first)
    for part in costs.layer(step, 1.0, 1.0):
        _append(found, part.name, part.stream, costs.layers * part.seconds)
    _append(found, "last", "compute", costs.once(step))
    return found


def _append(tasks: list[Task], name: str, stream: Stream, seconds: float) -> None:
    tasks.append(Task(name, stream, seconds, len(tasks) - 1 if tasks else None))


def lay_out(tasks: Sequence[Task]) -> list[tuple[float, float]]:
    """Begin and end of each, from the begin of the step: streams keep their order."""
    free = dict.fromkeys(STREAMS, 0.0)
    times: list[tuple[float, float]] = []
    for task in tasks:
        ready = times[task.after][1] if task.after is not None else 0.0
        begin = max(free[task.stream], ready)
        free[task.stream] = begin + task.seconds
        times.append((begin, free[task.stream]))
    return times
