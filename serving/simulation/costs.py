"""What a step costs: the protocol, and costs that are given as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal, NamedTuple, Protocol

from warploom.serving.simulation.checks import check_kind
from warploom.serving.simulation.steps import Step
from warploom.simulation_errors import BadCost, BadSetup

# what a simulation asks of costs
ASKED = ("layers", "host", "planner", "swap", "layer", "once")

Stream = Literal["compute", "communication"]
STREAMS: tuple[Stream, ...] = ("compute", "communication")


class HostSeconds(NamedTuple):
    """Of one step on the host.

    Attributes:
        schedule: choosing the batch, allocating, making inputs.
        plan: of attention.
        output: reading tokens, and passing them on.
    """

    schedule: float
    plan: float
    output: float


@dataclass(frozen=True)
class Section:
    """Part of a layer that one stream computes without a pause.

    Attributes:
        name: of it.
        stream: that computes it.
        seconds: that it takes.

    Raises:
        BadSetup: no such stream.
    """

    name: str
    stream: Stream
    seconds: float

    def __post_init__(self) -> None:
        if self.stream not in STREAMS:
            name, expected = f"the stream of {self.name!r}", " or ".join(map(repr, STREAMS))
            raise BadSetup(name=name, got=repr(self.stream), expected=expected)


class Costs(Protocol):
    """Seconds of a step; those of the device by streams with a share of the SMs each."""

    @property
    def layers(self) -> int:
        """Of the model."""
        ...

    def host(self, step: Step) -> HostSeconds:
        """On the host, with its planner."""
        ...

    def planner(self, step: Step) -> float:
        """Planning as a kernel of the device."""
        ...

    def swap(self, step: Step) -> float:
        """Putting tokens in place of their placeholders, on the device."""
        ...

    def layer(self, step: Step, compute: float, communication: float) -> Sequence[Section]:
        """One layer's parts in order; each waits for the one before.

        Args:
            step: what is computed.
            compute, communication: share of the SMs that each stream has.
        """
        ...

    def once(self, step: Step) -> float:
        """What comes once, behind the layers: the vocabulary's product, sampling."""
        ...


def check_cost(name: str, got: float, unit: str = "seconds", above_zero: bool = False) -> None:
    """Raises BadCost for what is negative, endless or no number, and for 0 where that is none."""
    if not isfinite(got) or got < 0 or (above_zero and got == 0):
        least = "a little more than 0" if above_zero else "0"
        raise BadCost(name=name, got=got, unit=unit, least=least)


@dataclass(frozen=True)
class GivenCosts:
    """Costs that somebody else has measured, or that a formula can follow.

    Attributes:
        sections: of one layer, whatever share the streams have.
        schedule, plan, output: of the host.
        planner_kernel, swap_kernel, last: of the device.
        layers: that are alike.
        rows: for which `sections` hold; a step with fewer takes as much less. 0: any step takes
            the same, and each micro-batch of `DualStreams` as long as the whole step. None: not
            told, which is 0 to other schedules, and `DualStreams` refuses.

    Raises:
        BadCost: one is negative or not finite.
        BadSetup: sections that are none.
    """

    sections: tuple[Section, ...]
    schedule: float = 0.0
    plan: float = 0.0
    output: float = 0.0
    planner_kernel: float = 0.0
    swap_kernel: float = 0.0
    last: float = 0.0
    layers: int = 1
    rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("schedule", "plan", "output", "planner_kernel", "swap_kernel", "last"):
            check_cost(name, getattr(self, name))
        what = "a tuple of Section(name, stream, seconds)"
        check_kind("sections", self.sections, ("__len__", "__getitem__"), what)
        for section in self.sections:
            check_kind("a section", section, Section, "Section(name, stream, seconds)")
            check_cost(f"the section {section.name!r}", section.seconds)
        check_cost("layers", self.layers, "layers", above_zero=True)
        check_cost("rows", self.rows or 0, "rows")

    def host(self, step: Step) -> HostSeconds:
        return HostSeconds(self.schedule, self.plan, self.output)

    def planner(self, step: Step) -> float:
        return self.planner_kernel

    def swap(self, step: Step) -> float:
        return self.swap_kernel

    def layer(self, step: Step, compute: float, communication: float) -> Sequence[Section]:
        if not self.rows:
            return self.sections
        part = step.rows / self.rows
        return [replace(section, seconds=part * section.seconds) for section in self.sections]

    def once(self, step: Step) -> float:
        return self.last
