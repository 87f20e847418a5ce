"""The planner's view of a mask: which keys a tile of query rows may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from warploom.scheduler.model.layout import Ints, Records
from warploom.scheduler.model.roles import Role

# segment, row_begin, row_end, kv_begin, kv_end; shape (n,) each
Where = tuple[Ints, Ints, Ints, Ints, Ints]


class Visibility(Protocol):
    """Key ranges and key tile counts of all tiles of a batch at once; arrays have shape (n,).

    Rows are fused rows of the segment (query row x group + query head in group), half open. Keys
    are indices into the segment's list, half open. Answers hold for all key/value heads. They may
    overestimate, never underestimate, what is visible.
    """

    def kv_bounds(self, segment: Ints, row_begin: Ints, row_end: Ints) -> tuple[Ints, Ints]:
        """Keys [begin, end) outside of which no row sees a key; begin >= end if rows see none."""
        ...

    def visible_tiles(
        self,
        segment: Ints,
        row_begin: Ints,
        row_end: Ints,
        kv_begin: Ints,
        kv_end: Ints,
        keys: int,
    ) -> Ints:
        """Tiles of `keys` keys, counted from kv_begin, that the kernel will not skip.

        Splitting [kv_begin, kv_end) at a multiple of `keys` must not change the sum, and an empty
        range has none.
        """
        ...


class AllVisible:
    """No mask: each row sees all keys of its segment."""

    def __init__(self, segments: Records) -> None:
        self._kv_count = segments["kv_count"].astype("int64")

    def kv_bounds(self, segment: Ints, row_begin: Ints, row_end: Ints) -> tuple[Ints, Ints]:
        return segment * 0, self._kv_count[segment]

    def visible_tiles(
        self,
        segment: Ints,
        row_begin: Ints,
        row_end: Ints,
        kv_begin: Ints,
        kv_end: Ints,
        keys: int,
    ) -> Ints:
        return -((kv_begin - kv_end) // keys)


def visible_tiles(visibility: Visibility, roles: Sequence[Role], role: Ints, where: Where) -> Ints:
    """Key tiles that the kernel will not skip, each of the size of its role.

    Args:
        visibility: the mask's answers.
        roles: all roles.
        role: (n,) index of each tile's role.
        where: rows and keys, as `Visibility.visible_tiles` takes them.
    """
    if len(roles) == 1:
        return visibility.visible_tiles(*where, roles[0].keys)
    found = np.zeros(len(role), np.int64)
    for number, own in enumerate(roles):
        mine = np.flatnonzero(role == number)
        segment, row_begin, row_end, kv_begin, kv_end = (column[mine] for column in where)
        found[mine] = visibility.visible_tiles(
            segment, row_begin, row_end, kv_begin, kv_end, own.keys
        )
    return found
