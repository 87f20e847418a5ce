"""Refusals in the words of whom they speak to: writers of variant classes, or of functions of flex.

A `score_mod` has no fields and no `at`. While one is run, refusals speak of `q_idx`, `kv_idx` and
captured tensors, and of torch's functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_OF_FLEX: ContextVar[bool] = ContextVar("of_flex", default=False)


@contextmanager
def of_flex() -> Iterator[None]:
    """Within the context, a `score_mod` or `mask_mod` runs."""
    token = _OF_FLEX.set(True)
    try:
        yield
    finally:
        _OF_FLEX.reset(token)


@dataclass(frozen=True)
class Words:
    """A sentence in two versions; `str` gives the one for the function that runs."""

    of_class: str
    of_flex: str

    def __str__(self) -> str:
        return self.of_flex if _OF_FLEX.get() else self.of_class
