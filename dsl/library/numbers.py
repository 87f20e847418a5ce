"""Numbers that shipped variants are made with."""

from __future__ import annotations

import math

from warploom.errors import ArgumentError


def check_positive(hint: str = "", **numbers: float) -> None:
    """Raises ArgumentError for the first number that is not above 0 and finite."""
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ArgumentError(name=name, reason=f"{value} is not above 0 and finite{hint}")
