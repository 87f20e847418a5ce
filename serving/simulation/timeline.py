"""When each resource was busy, as numbers, as trace events and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple


class Interval(NamedTuple):
    """What a resource did; seconds."""

    name: str
    begin: float
    end: float


class Timeline:
    """Lanes of intervals; a lane is "engine/resource"."""

    def __init__(self) -> None:
        self.lanes: dict[str, list[Interval]] = {}

    def add(self, lane: str, name: str, begin: float, end: float) -> None:
        self.lanes.setdefault(lane, []).append(Interval(name, begin, end))

    def busy(self, lane: str, until: float = inf) -> float:
        """Seconds in which it had a job, up to some time."""
        spans = (min(one.end, until) - one.begin for one in self.lanes.get(lane, ()))
        return sum(span for span in spans if span > 0)

    def overlaps(self) -> list[tuple[str, Interval, Interval]]:
        """Jobs of one lane that run at the same time: none, where a resource has one at a time."""
        return [
            (lane, before, behind)
            for lane, found in self.lanes.items()
            for before, behind in pairwise(sorted(found, key=lambda one: one[1:]))
            if behind.begin < before.end - 1e-12
        ]

    def write(self, path: Path | str) -> None:
        """As trace events in JSON, which Perfetto opens: an engine is a process, a lane a thread.

        By Chromium's "Trace Event Format", as `wl.trace` writes; times are microseconds. Missing
        folders are made.
        """
        document = {"traceEvents": list(self._events()), "displayTimeUnit": "ms"}
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(document))

    def _events(self) -> Iterator[dict[str, Any]]:
        engines: dict[str, int] = {}
        for thread, (lane, found) in enumerate(self.lanes.items()):
            engine, _, resource = lane.rpartition("/")
            at = {"pid": engines.setdefault(engine, len(engines)), "tid": thread}
            yield {"name": "process_name", "ph": "M", **at, "args": {"name": engine}}
            yield {"name": "thread_name", "ph": "M", **at, "args": {"name": resource}}
            for one in found:
                times = {"ts": 1e6 * one.begin, "dur": 1e6 * (one.end - one.begin)}
                yield {"name": one.name, "cat": resource, "ph": "X", **times, **at}


def draw_timelines(
    timelines: Mapping[str, Timeline], lanes: Sequence[str], window: tuple[float, float], axes: Any
) -> None:
    """Bars of several schedules below each other; even and odd steps differ in colour.

    Args:
        timelines: by name, from the top.
        lanes: ends of the lanes' names that are drawn, from the top.
        window: seconds from and to.
        axes: of matplotlib.
    """
    names: list[str] = []
    for name, timeline in timelines.items():
        for end in lanes:
            for lane, found in timeline.lanes.items():
                if not lane.endswith(end):
                    continue
                shown = [x for x in found if x.end > window[0] and x.begin < window[1]]
                bars = [(1e3 * x.begin, 1e3 * (x.end - x.begin)) for x in shown]
                axes.broken_barh(bars, (-len(names) - 0.4, 0.8), facecolors=_colours(shown))
                names.append(f"{name}: {end}")
    axes.set(yticks=[-i for i in range(len(names))], yticklabels=names, xlabel="ms")
    axes.set_xlim(1e3 * window[0], 1e3 * window[1])


def _colours(shown: Sequence[Interval]) -> list[str]:
    """By the step's number, the last word of a name; without one, by the first letter."""
    tails = [one.name.rpartition(" ")[2] for one in shown]
    numbers = [int(tail) if tail.isdigit() else ord(tail[0]) for tail in tails]
    return [f"C{number % 2}" for number in numbers]
