"""How many lanes the rotations of a variant turn, remembered until the vectors' length is known.

A functor is traced before anyone says how long its vectors are, so a rotation of more lanes than
there are is found when attention is declared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from warploom.dsl.types.spec import TracedVariant
from warploom.errors import ArgumentError

_QK_HOOKS = ("query_transform", "key_transform")

_widest: ContextVar[list[int] | None] = ContextVar("widest", default=None)


@contextmanager
def recording() -> Iterator[list[int]]:
    """Collect the widths of rotations; the list is filled as they are traced."""
    found: list[int] = []
    token = _widest.set(found)
    try:
        yield found
    finally:
        _widest.reset(token)


def record(dim: int) -> None:
    """Remember that `dim` lanes are rotated."""
    found = _widest.get()
    if found is not None:
        found.append(dim)


def check(traced: TracedVariant, head_dim: int, head_dim_v: int) -> None:
    """Compare the rotations of a variant with the lanes that its vectors have.

    Raises:
        ArgumentError: a hook rotates more lanes than there are.
    """
    for hook, dim in traced.rotated:
        name, lanes = ("head_dim", head_dim) if hook in _QK_HOOKS else ("head_dim_v", head_dim_v)
        if dim > lanes:
            reason = f"{hook} rotates {dim} lanes, but {name} is {lanes}; give dim={lanes} or less"
            raise ArgumentError(name=traced.name, reason=reason)
