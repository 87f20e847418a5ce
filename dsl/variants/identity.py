"""Numbers that identify objects for ever; an `id` does so only while its object lives."""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from typing import Any

_numbers: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id
_count = itertools.count()


def number_of(value: object) -> int | None:
    """A number of this object that no later object gets; None without weak references to it."""
    known = _numbers.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    try:
        reference = weakref.ref(value, partial(_forget, id(value)))
    except TypeError:
        return None
    _numbers[id(value)] = made = reference, next(_count)
    return made[1]


def _forget(place: int, reference: weakref.ref[Any]) -> None:
    known = _numbers.get(place)
    if known is not None and known[0] is reference:
        del _numbers[place]
