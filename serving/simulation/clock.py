"""Events in the order of their time, and what serves one job after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from warploom.serving.simulation.timeline import Timeline

Begin = Callable[[], "tuple[str, float] | None"]


class Clock:
    """Runs what is due; events of one time run in the order in which they were entered."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, what: Callable[[], None]) -> None:
        """Enter an event; one of the past would be a mistake of the simulator."""
        assert time >= self.now
        heappush(self._events, (time, next(self._numbers), what))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, what = heappop(self._events)
            what()


class Resource:
    """A thread of the host or a device: one job at a time, first come, first served.

    What a job is, and how long it takes, is asked when it begins: a plan is made of what is known
    then, and not of what was known when it was asked for.
    """

    def __init__(self, clock: Clock, timeline: Timeline, lane: str) -> None:
        self._clock, self._timeline, self._lane = clock, timeline, lane
        self._jobs: deque[tuple[Begin, Callable[[], None]]] = deque()
        self._is_busy = False

    def submit(self, begin: Begin, then: Callable[[], None]) -> None:
        """Args:
        begin: called when the job's turn comes; its name and seconds, or None if there is
            nothing to do any more.
        then: called when it is done, or at once where there was nothing to do.
        """
        self._jobs.append((begin, then))
        self._next()

    def _next(self) -> None:
        if self._is_busy or not self._jobs:
            return
        begin, then = self._jobs.popleft()
        self._is_busy = True
        job = begin()
        start = self._clock.now

        def done() -> None:
            if job is not None:
                self._timeline.add(self._lane, job[0], start, self._clock.now)
            self._is_busy = False
            then()
            self._next()

        self._clock.at(start + (job[1] if job else 0.0), done)
