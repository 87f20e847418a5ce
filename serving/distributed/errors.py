"""Errors of several processes, and after which time there is one; others: `warploom.errors`."""

from __future__ import annotations

from numbers import Real
from typing import Any

from warploom.errors import ArgumentError, WarploomError

_LONGEST = 1e6  # seconds; sockets count milliseconds in 32 bits


class RankLost(WarploomError):
    """A rank of the group has ended, or did not answer in time.

    Who gets it should end, too: the group cannot be used any more. Ranks that wait for one that
    ended so name that one, so of several messages the first tells where it began.
    """

    message = (
        "rank {rank} of {world} was lost: {what} between it and rank {own} failed ({reason}). Its "
        "process has ended, or did not answer in time. Restart the group; a slow rank needs a "
        "larger timeout=."
    )


class OutOfStep(RankLost):
    """An earlier run failed after ranks had begun to exchange.

    Others may be ahead, and what is still under way could be taken for part of this run.
    """

    message = (
        "an earlier run on rank {own} of {world} failed in the midst of an exchange ({reason}), so "
        "that ranks are out of step. Make a new process group and a new wrapper over it, on all "
        "ranks."
    )


class TransferLost(WarploomError):
    """Pages did not arrive, or were not taken."""

    message = (
        "the hand-over of {what} was lost: {reason}. No page of it may be used. Prefill again, "
        "here or elsewhere; a slow peer needs a larger timeout=."
    )


def checked_timeout(seconds: Any) -> float:
    """Seconds to wait for another process; raises ArgumentError for others than a short while.

    gloo counts milliseconds, and takes none of them, or a negative number, for a rank that is late.
    """
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not (is_number and 1e-3 <= float(seconds) <= _LONGEST):  # nan is not between, either
        reason = f"is {seconds!r}; expected seconds from 0.001 to {_LONGEST:g}"
        raise ArgumentError(name="timeout", reason=reason)
    return float(seconds)
