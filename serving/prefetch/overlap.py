"""What a prefetch beside a collective saves on a real GPU: few terms, fitted to recorded times.

`l2_model.predict` is the paper's: whatever memory could deliver during the collective hits, and
every hit is gained. On a GPU five things take from that. The kernel that asks starts late; its CTAs
ask at a rate of their own, below memory's; L2 keeps less than its size; a reader gains only part of
a hit's time, since it starts slowly and L2's rate is bounded, too; and the CTAs that still ask when
the collective ends keep their SMs from the reader. `benchmarks/fit_prefetch.py` fits the constants;
those of an H100 and an H200 are in `recorded.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from warploom.errors import ArgumentError

LINE = 128
_SURE = 2  # errors that a saving must exceed: the true one is then seldom negative
_IN_TIME = 0.9  # of what arrives; a byte too many costs several times what one in time gains


@dataclass(frozen=True)
class Overlap:
    """A GPU whose prefetches were timed; bytes and seconds.

    Attributes:
        bandwidth: of memory, for one that reads it all.
        startup: from the collective's launch to the first bytes of a prefetch.
        rate: bytes a second that one CTA asks for. All together get no more than `bandwidth`.
        kept: bytes that stay in L2 until they are read.
        gain: part of the time of a hit, at `bandwidth`, that its reader gains.
        late: part of the time by which a prefetch outlasts its collective that the reader loses:
            most of it, since a grid that wants all SMs waits for those of the prefetch.
        fork: what each prefetch costs, for its launch and for joining its stream.
        error: of `saved`: the root of the mean square on cases that it was not fitted to.
    """

    bandwidth: float
    startup: float
    rate: float
    kept: float
    gain: float
    late: float
    fork: float
    error: float

    def __post_init__(self) -> None:
        positive = self.bandwidth, self.rate, self.kept
        rest = self.startup, self.gain, self.late, self.fork, self.error
        if min(positive) <= 0 or min(rest) < 0:
            reason = "has a rate or size that is not positive, or a negative time or part"
            raise ArgumentError(name="overlap", reason=reason)

    def asks(self, sms: int) -> float:
        """Bytes a second that so many CTAs ask for."""
        return min(self.bandwidth, sms * self.rate)

    def arrives(self, collective: float, sms: int) -> float:
        """Bytes that so many CTAs bring while a collective of so many seconds runs."""
        return self.asks(sms) * max(0.0, collective - self.startup)

    def parts(self, collective: float, size: float, asked: float, sms: int) -> tuple[float, float]:
        """Seconds of memory that hits stand for, and seconds that a prefetch outlasts a collective.

        Both before `gain` and `late`. More than `kept` drives out what came first; of what is read
        in the same order as it came, so much is gone by the time it is wanted.
        """
        asked = min(asked, size)
        arrived = min(asked, self.arrives(collective, sms))
        hits = max(0.0, min(arrived, 2 * self.kept - arrived))
        return hits / self.bandwidth, (asked - arrived) / self.asks(sms)

    def saved(self, collective: float, size: float, asked: float, sms: int) -> float:
        """Seconds by which a collective and the reads of `size` bytes behind it shrink.

        Negative: the step grows. Nothing is asked for, nothing is saved.
        """
        if asked <= 0:
            return 0.0
        hits, late = self.parts(collective, size, asked, sms)
        return self.gain * hits - self.late * late - self.fork

    def best_bytes(self, collective: float, size: float, sms: int) -> int:
        """The budget to ask for: most of what arrives, stays and is read, or 0.

        A tenth less than arrives is asked for, since a byte that comes late costs several times
        what one in time gains. The budget is 0 where the saving is within two errors.

        Returns:
            Bytes in whole lines of 128.
        """
        in_time = _IN_TIME * self.arrives(collective, sms)
        best = int(min(in_time, self.kept, size)) // LINE * LINE
        return best if self.saved(collective, size, best, sms) > _SURE * self.error else 0


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
