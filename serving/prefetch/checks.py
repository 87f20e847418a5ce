"""Arguments of budgets and of the model: durations, counts, and what a name stands for."""

from __future__ import annotations

from math import isfinite
from numbers import Integral, Real

from warploom.errors import ArgumentError

LONGEST = 0.1  # seconds: no collective of a decoding step takes that, and microseconds exceed it


def checked_seconds(name: str, seconds: object) -> float:
    """A collective's duration; raises ArgumentError for what is none, as microseconds are."""
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        reason = f"is {seconds!r}; expected a duration in seconds, or a Ring in a SafeBudget"
        raise ArgumentError(name=name, reason=reason)
    value = float(seconds)
    if not 0 <= value <= LONGEST:  # as of nan, too
        reason = f"is {seconds}; expected a duration in seconds, 0 to {LONGEST}: 10 us are 10e-6"
        raise ArgumentError(name=name, reason=reason)
    return value


def checked_number(name: str, number: object, zero: bool = False) -> float:
    """A finite number above 0, or from 0 on; raises ArgumentError."""
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    value = float(number) if isinstance(number, Real) else -1.0
    if not is_number or not isfinite(value) or value < 0 or (value == 0 and not zero):
        expected = "a number from 0 on" if zero else "a number above 0"
        raise ArgumentError(name=name, reason=f"is {number!r}; expected {expected}")
    return value


def checked_count(name: str, number: object) -> None:
    """Raise ArgumentError for anything but a whole number from 1 on."""
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
        reason = f"is {number!r}; expected a whole number from 1 on"
        raise ArgumentError(name=name, reason=reason)


def checked_keep(keep: object) -> bool | None:
    """Whether lines are marked, or None; raises ArgumentError for anything else."""
    if keep is None or isinstance(keep, bool):
        return keep
    reason = f"is {keep!r}; expected True, False, or None for what is larger than half of L2"
    raise ArgumentError(name="keep", reason=reason)


def checked_kind(name: str, given: object, kind: type, hint: str) -> None:
    """Raise ArgumentError where an object is of another class."""
    if not isinstance(given, kind):
        reason = f"is of class {type(given).__name__}; expected {hint}"
        raise ArgumentError(name=name, reason=reason)
