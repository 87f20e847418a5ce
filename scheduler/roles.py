"""Roles: what CTAs of one pass do, each with a tile of its own, such as prefill and decode.

A segment takes the role with the fewest rows whose tile holds all of its rows, and else the one
with the most. So a segment has as many query tiles as if all had the largest tile, and capacities
of one tile hold for several (decision 0040).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from warploom.errors import ArgumentError
from warploom.scheduler.layout import Ints, Records

FIRST = "prefill"  # what the role with the most rows is called


@dataclass(frozen=True)
class Role:
    """What some CTAs of a pass do.

    Attributes:
        name: such as "decode", for people.
        rows, keys: of its tile.
    """

    name: str
    rows: int
    keys: int


@dataclass(frozen=True)
class RoleWork:
    """What a role has to do in one plan.

    Attributes:
        role: with its tile.
        segments: whose rows it takes; those without rows are left out.
        items: work items.
        ctas: CTAs that have some; `mixed` of them have items of other roles, too.
    """

    role: Role
    segments: int
    items: int
    ctas: int
    mixed: int


def check_roles(roles: Sequence[Role]) -> None:
    """Refuses roles that no rule could tell apart.

    Raises:
        ArgumentError: sizes below 1, or rows that do not fall from role to role.
    """
    for role in roles:
        if role.rows < 1 or role.keys < 1:
            reason = f"{role.name} has a tile of {role.rows} x {role.keys}; expected at least 1 x 1"
            raise ArgumentError(name="roles", reason=reason)
    for number, role in enumerate(roles[1:]):
        larger = roles[number]
        if role.rows >= larger.rows:
            reason = f"{role.name} has {role.rows} rows; expected fewer than {larger.name}, "
            raise ArgumentError(name="roles", reason=f"{reason}{larger.rows}")


def roles_of(segments: Records, group_size: int, roles: Sequence[Role]) -> Ints:
    """The index of each segment's role.

    Args:
        segments: SEGMENT records, shape (n,).
        group_size: query heads of each key/value head.
        roles: the one with the most rows first.

    Returns:
        (n,) indices into `roles`.
    """
    fused = segments["num_q"].astype(np.int64) * group_size
    found = np.zeros(len(segments), np.int64)
    for number, role in enumerate(roles[1:], 1):
        found[fused <= role.rows] = number
    return found
