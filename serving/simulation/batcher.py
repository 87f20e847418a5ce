"""Continuous batching of one group: who decodes in a step, and how much of which prompt is read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from warploom.serving.simulation.arrivals import Request
from warploom.serving.simulation.steps import Batch, Piece
from warploom.simulation_errors import BadSetup, NeverFits


@dataclass(frozen=True)
class Limits:
    """Of a group.

    Attributes:
        requests: that are served at a time.
        rows: query rows of a step, decodes included; a prompt is read in chunks of what they leave.
        kv_tokens: that the cache has room for; a request waits until its prompt and its whole
            output fit, so that nobody is ever evicted.

    Raises:
        BadSetup: one is below 1, or rows are fewer than requests.
    """

    requests: int = 128
    rows: int = 2048
    kv_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        for name in ("requests", "kv_tokens"):
            if getattr(self, name) < 1:
                raise BadSetup(name=name, got=getattr(self, name), expected="at least 1")
        if self.rows < self.requests:
            expected = f"at least {self.requests}, one for each of requests={self.requests}"
            raise BadSetup(name="rows", got=self.rows, expected=expected)


@dataclass
class Served:
    """A request on its way.

    Attributes:
        number: of the request.
        request: itself.
        group: where its keys are.
        read: tokens of its prompt that are in steps so far.
        planned: tokens of its output that are in steps so far.
        seen: those that the host has seen.
        first, last: when the first and the last came, in seconds.
    """

    number: int
    request: Request
    group: int = 0
    read: int = 0
    planned: int = 0
    seen: int = 0
    first: float = 0.0
    last: float = 0.0

    @property
    def keys(self) -> int:
        """Tokens with keys in the cache, once the planned steps are done."""
        return self.read + max(0, self.planned - 1)

    @property
    def most(self) -> int:
        """Tokens of its whole life."""
        return self.request.prompt + self.request.output


class Batcher:
    """Requests of one group: those that wait, in order, and those that are served."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[Served] = deque()
        self.running: dict[int, Served] = {}
        self._reserved = 0

    @property
    def requests(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the cache, and prompts that will be."""
        running = sum(max(one.keys, one.request.prompt) for one in self.running.values())
        return running + sum(one.request.prompt for one in self.waiting)

    def add(self, served: Served) -> None:
        """At the end of the queue; raises NeverFits."""
        if served.most > self.limits.kv_tokens:
            capacity = self.limits.kv_tokens
            raise NeverFits(request=served.number, tokens=served.most, capacity=capacity)
        self.waiting.append(served)

    def form(self, knows_ends: bool) -> Batch:
        """The next step's rows, as if all planned ones were computed.

        Args:
            knows_ends: whether a request whose last token is planned, but not seen, is left out.
                Where ends are found in the tokens (an end-of-sequence token), the next row of such
                a request is computed for nothing.
        """
        pieces = [
            self._decode(one)
            for one in self.running.values()
            if one.read == one.request.prompt and self._goes_on(one, knows_ends)
        ]
        left = self.limits.rows - len(pieces)
        for one in list(self.running.values()):
            left -= self._chunk(one, left, pieces)
        while left and self.waiting and self._admits(self.waiting[0]):
            one = self.waiting.popleft()
            self.running[one.number] = one
            self._reserved += one.most
            left -= self._chunk(one, left, pieces)
        return Batch(tuple(pieces))

    def see(self, served: Served) -> bool:
        """One more token of a request is read by the host; whether it was the last."""
        served.seen += 1
        if served.seen < served.request.output:
            return False
        self.leave(served)
        return True

    def leave(self, served: Served) -> None:
        del self.running[served.number]
        self._reserved -= served.most

    def takes(self, served: Served) -> bool:
        """Whether a request that runs elsewhere could go on here."""
        return len(self.running) < self.limits.requests and self._has_room(served)

    def enter(self, served: Served) -> None:
        self.running[served.number] = served
        self._reserved += served.most

    def _goes_on(self, one: Served, knows_ends: bool) -> bool:
        return (one.planned if knows_ends else one.seen) < one.request.output

    def _decode(self, one: Served) -> Piece:
        emits = one.planned < one.request.output
        one.planned += emits
        return Piece(one.number, 1, one.read + max(1, one.planned - emits), emits)

    def _chunk(self, one: Served, most: int, pieces: list[Piece]) -> int:
        """Append a chunk of a prompt, if any is left; its rows."""
        rows = min(most, one.request.prompt - one.read)
        if rows <= 0:
            return 0
        one.read += rows
        emits = one.read == one.request.prompt
        one.planned += emits
        pieces.append(Piece(one.number, rows, one.read, emits))
        return rows

    def _admits(self, one: Served) -> bool:
        return len(self.running) < self.limits.requests and self._has_room(one)

    def _has_room(self, one: Served) -> bool:
        return self._reserved + one.most <= self.limits.kv_tokens
