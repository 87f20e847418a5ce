"""Arithmetic on sizes."""

from __future__ import annotations


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is not below n."""
    return -(-n // multiple) * multiple
