"""Numbers that shipped variants are made with."""

from __future__ import annotations

import math

from warploom.errors import ArgumentError


def positive(value: float) -> str | None:
    """The check of a `Scalar` that is above 0 and finite."""
    return None if 0 < value < math.inf else f"{value} is not above 0 and finite"


def check_positive(**numbers: float) -> None:
    """Raises ArgumentError for the first number that is not above 0 and finite."""
    for name, value in numbers.items():
        if reason := positive(value):
            raise ArgumentError(name=name, reason=reason)
