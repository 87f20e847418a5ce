"""What a prefetch beside a collective saves on a real GPU: few terms, fitted to recorded times.

`performance.predict` is the paper's: whatever memory could deliver during the collective hits, and
every hit is gained. On a GPU the kernel that asks starts late, its CTAs ask at a rate of their own,
and the reader waits for the last of them, since streams join; L2 keeps half of its size; and a
reader takes hits at L2's rate, which is not much above memory's. `benchmarks/fit_prefetch.py` fits
the constants; those of an H100 and an H200 are in `recorded.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median

from warploom.errors import ArgumentError
from warploom.serving.prefetch.checks import checked_count, checked_kind, checked_seconds

LINE = 128
CTAS = (8, 16, 32)  # what is chosen from: fewer ask for less than memory brings, more bring no more
_SURE = 2  # errors that a saving may be off
_MOST_LOST = 0.01  # of a step, if it is off by so many
_IN_TIME = 0.9  # of what arrives; a byte too many costs several times what one in time gains


@dataclass(frozen=True)
class Overlap:
    """A GPU whose prefetches were timed; bytes and seconds.

    Attributes:
        bandwidth: of memory, for one that reads it all.
        startup: from the collective's launch to the first bytes of a prefetch.
        rate: bytes a second that one CTA asks for. Memory brings no more than `bandwidth`.
        kept: bytes that stay in L2 until they are read.
        hit_rate: bytes a second that a reader takes from L2.
        fixed: what a prefetch costs its reader whatever it brings: a launch and joining its
            stream, less what the reader's start gains. It is the reader's (`for_reader`).
        error: of `saved`: the root of the mean square on cases that it was not fitted to.
        own_error: the same for readers whose own `fixed` is known.
    """

    bandwidth: float
    startup: float
    rate: float
    kept: float
    hit_rate: float
    fixed: float
    error: float
    own_error: float

    def __post_init__(self) -> None:
        positive = self.bandwidth, self.rate, self.kept, self.hit_rate
        rest = self.startup, self.error, self.own_error
        if min(positive) <= 0 or min(rest) < 0 or not isfinite(self.fixed):
            reason = "has a rate or size that is not positive, or a time that is none"
            raise ArgumentError(name="overlap", reason=reason)

    @property
    def gain(self) -> float:
        """Part of a hit's time, at memory's rate, that the reader gains."""
        return 1 - self.bandwidth / self.hit_rate

    def arrives(self, collective: float, sms: int) -> float:
        """Bytes that so many CTAs bring while a collective of so many seconds runs."""
        checked_seconds("collective", collective)
        checked_count("sms", sms)
        return min(self.bandwidth, sms * self.rate) * max(0.0, collective - self.startup)

    def parts(self, collective: float, size: float, asked: float, sms: int) -> tuple[float, float]:
        """Seconds of memory that hits stand for, and seconds that the reader begins late.

        It begins when the collective and the kernel that asks are done. What was asked for and has
        not come by then is read as any other byte. More than `kept` drives out as much.
        """
        checked_seconds("collective", collective)
        checked_count("sms", sms)
        asked = min(asked, size)
        begin = max(collective, self.startup + asked / (sms * self.rate))
        hits = min(asked, self.kept, self.bandwidth * max(0.0, begin - self.startup))
        return hits / self.bandwidth, begin - collective

    def saved(self, collective: float, size: float, asked: float, sms: int) -> float:
        """Seconds by which a collective and the reads of `size` bytes behind it shrink.

        Negative: the step grows. Nothing is asked for, nothing is saved.
        """
        if asked <= 0:
            return 0.0
        hits, late = self.parts(collective, size, asked, sms)
        return self.gain * hits - late - self.fixed

    def best_bytes(self, collective: float, size: float, sms: int) -> int:
        """The budget to ask for: most of what arrives, stays and is read, or 0.

        A tenth less than arrives is asked for, since a byte that comes late costs several times
        what one in time gains. The budget is 0 where nothing is saved, and where two errors would
        make of the saving a loss of more than 1 % of the step.

        Returns:
            Bytes in whole lines of 128.
        """
        in_time = _IN_TIME * self.arrives(collective, sms)
        best = int(min(in_time, self.kept, size)) // LINE * LINE
        step = collective + size / self.bandwidth
        least = max(0.0, _SURE * self.error - _MOST_LOST * step)
        return best if self.saved(collective, size, best, sms) > least else 0

    def best(self, collective: float, size: float, sms: Sequence[int] = CTAS) -> tuple[int, int]:
        """The budget and the CTAs that save most: the fewest of those that save as much.

        Args:
            collective: its seconds.
            size: bytes that are read behind it.
            sms: numbers of CTAs to choose from.

        Returns:
            Bytes as `best_bytes` has them, and CTAs. The bytes are 0 where none of these is sure
            enough to save something.

        Raises:
            ArgumentError: no numbers of CTAs, or one below 1; a duration that is none, or above
                0.1 s, as microseconds are.
        """
        if not isinstance(sms, Sequence) or not sms:
            reason = f"is {sms!r}; expected numbers of CTAs to choose from, as (8,)"
            raise ArgumentError(name="sms", reason=reason)
        for count in sms:
            checked_count("sms", count)
        asked = {n: self.best_bytes(collective, size, n) for n in sorted(sms)}
        chosen = max(asked, key=lambda n: self.saved(collective, size, asked[n], n))
        return asked[chosen], chosen

    def for_reader(self, timed: Sequence[Timed]) -> Overlap:
        """This GPU for one reader, some of whose steps were timed.

        What a kernel makes of hits differs by more than a prefetch saves, and one constant tells
        most of it: `fixed` becomes the median of what these steps say, and `error` `own_error`.
        Five steps whose bytes come in time, each captured anew, find it.
        """
        if not timed:
            raise ArgumentError(name="timed", reason="is empty; give steps with a prefetch")
        for one in timed:
            checked_kind("timed", one, Timed, "a Timed(case, collective, size, ...) for each step")
        off = [self.saved(x.collective, x.size, x.asked, x.sms) - x.saved for x in timed]
        return replace(self, fixed=self.fixed + median(off), error=self.own_error)


@dataclass(frozen=True)
class Timed:
    """A recorded step.

    Attributes:
        case: what was read behind which collective.
        collective, size, asked, sms: arguments of `Overlap.saved`.
        without, seconds: of the step without the prefetch, and with it.
    """

    case: str
    collective: float
    size: float
    asked: float
    sms: int
    without: float
    seconds: float

    @property
    def saved(self) -> float:
        return self.without - self.seconds


def by_case(timed: Iterable[Timed]) -> dict[tuple[str, int], list[Timed]]:
    """Steps of a case and a number of CTAs, by bytes that were asked for."""
    found: dict[tuple[str, int], list[Timed]] = {}
    for one in sorted(timed, key=lambda one: one.asked):
        found.setdefault((one.case, one.sms), []).append(one)
    return found
