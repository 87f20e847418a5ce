"""How long one process waits for another."""

from __future__ import annotations

from numbers import Real
from typing import Any

from warploom.errors import ArgumentError

_LONGEST = 1e6  # seconds; sockets count milliseconds in 32 bits


def checked_timeout(seconds: Any) -> float:
    """Seconds to wait for another process; raises ArgumentError for others than a short while.

    gloo counts milliseconds, and takes none of them, or a negative number, for a rank that is late.
    """
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not (is_number and 1e-3 <= float(seconds) <= _LONGEST):  # nan is not between, either
        reason = f"is {seconds!r}; expected seconds from 0.001 to {_LONGEST:g}"
        raise ArgumentError(name="timeout", reason=reason)
    return float(seconds)
