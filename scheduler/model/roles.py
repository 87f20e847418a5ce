"""Roles: the kinds of work of one pass, such as prefill and decode, each with its own tile.

Of the roles whose tile holds all rows of a segment, the segment takes the one with the fewest rows;
if no tile holds them, it takes the role with the most rows. So a segment has as many query tiles as
if all roles had the largest tile, and the capacities of one tile hold for both (decision 0040).
Decision 0043 says which CTAs take which role, and which lists a CTA claims after its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from warploom.errors import ArgumentError
from warploom.scheduler.model.constants import CTA_BITS, ENDS, PER_IDLE_PREFILL
from warploom.scheduler.model.cost import OPENING, CostModel
from warploom.scheduler.model.layout import ROLE_LISTS, Ints, Records

FIRST = "prefill"  # name of the role with the most rows
_MOST = 2  # most roles of a plan
MOST_CTAS = 2**CTA_BITS - 1

# On an H200 it costs about 10 us to open a piece of a prefill, to write its partial result and to
# merge it: as much as 800 keys. If prefills are cut, a CTA has two pieces. If not, the last CTA to
# finish is half a prefill above the mean load; with fewer prefills than CTAs, it is late by all
# that its prefill has beyond the mean load.
SHORTEST_CUT = 4096  # keys


@dataclass(frozen=True)
class Role:
    """A kind of work that some CTAs of a pass do.

    Attributes:
        name: such as "decode", for people.
        rows, keys: size of its tile.
    """

    name: str
    rows: int
    keys: int


@dataclass(frozen=True)
class RolePrices:
    """What the work of two roles costs; the planner divides CTAs between the roles by it.

    Attributes:
        units: picoseconds that one CTA takes for one unit of each role's `CostModel`, in the order
            of the roles. If the time of a plan is not needed, another unit will do.
        saturating: CTAs of the last role that together saturate memory bandwidth.
        claim: keys of the shortest list of the last role that is worth claiming. The default is a
            guess: several times what a CTA could read while it opens a list.
        cached_keys: keys of one head that the cache holds; None: all keys that a batch may have.
        shortest_cut: keys of the shortest item of the first role that is cut, rounded up to key
            tiles. Shorter items are cut, too, if one exceeds a CTA's equal slice of all items by
            1/LATE of `shortest_cut`.
        may_deal_beside_decodes: whether prefills may be dealt beside decodes, too, if
            `Problem.may_deal` (decision 0062). That leaves less work to be claimed, so it is true
            only where the price of a prefill is known.
    """

    units: tuple[int, int]
    saturating: int
    claim: int = 8 * OPENING
    cached_keys: int | None = None
    shortest_cut: int = SHORTEST_CUT
    may_deal_beside_decodes: bool = True

    @property
    def least(self) -> int:
        """The smallest of all numbers; each must be at least 1."""
        known = () if self.cached_keys is None else (self.cached_keys,)
        return min(*self.units, self.saturating, self.claim, self.shortest_cut, *known)

    @classmethod
    def of_tiles(
        cls,
        roles: Sequence[Role],
        tiles: Sequence[int],
        saturating: int,
        cached_keys: int | None = None,
        may_deal_beside_decodes: bool = True,
    ) -> RolePrices:
        """Prices from the cost of one key tile of each role, rounded up.

        Args:
            roles: two roles.
            tiles: price of a key tile of each role.
            saturating, cached_keys, may_deal_beside_decodes: see the attributes.
        """
        first, second = (
            -(-price // CostModel.for_stream_k(role.rows, role.keys).per_tile)
            for role, price in zip(roles, tiles, strict=True)
        )
        return cls(
            (first, second), saturating, cached_keys=cached_keys,
            may_deal_beside_decodes=may_deal_beside_decodes,
        )  # fmt: skip

    def ctas(self, work: Sequence[int], active: int) -> tuple[int, int]:
        """How many of the active CTAs take each role.

        If work could be cut anywhere, it would take T = max(decode / saturating, all / active):
        decodes get no faster on more CTAs than saturate memory. Where memory is the limit, some of
        the other CTAs are needed by neither role. Prefills get a quarter of these idle CTAs and
        decodes the rest, since either role may be slower beside the other than its price says; and
        prefills get at least half of the CTAs beyond the saturating ones. Else the number of
        prefilling CTAs is rounded down: a CTA that is done with decodes goes on with prefills, but
        a prefilling CTA never decodes. A single active CTA has both roles.

        Args:
            work: cost of all items of each role, in units of its cost model.
            active: CTAs that may get work.
        """
        prefill, decode = (size * unit for size, unit in zip(work, self.units, strict=True))
        if prefill == 0 or decode == 0:
            return (active, 0) if prefill else (0, active)
        if active == 1:
            return 1, 1
        saturating = min(self.saturating, active)
        others, by_memory = active - saturating, -(-prefill * saturating // decode)
        taken = prefill * active // (prefill + decode)
        if by_memory < others:
            taken = max(by_memory + (others - by_memory) // PER_IDLE_PREFILL, others // 2)
        taken = max(1, min(taken, active - 1))
        return taken, active - taken

    def least_claim(self, model: CostModel, keys: int) -> int:
        """Least cost of a shared list of the last role.

        Args:
            model: cost model of the role's tile.
            keys: keys of that tile.
        """
        return max(model.least_slice, model.per_tile * -(-self.claim // keys))

    def cut_tiles(self, keys: int) -> int:
        """`shortest_cut` in key tiles of `keys` keys, rounded up."""
        return -(-self.shortest_cut // keys)

    def time(self, loads: Sequence[int], active: int) -> int:
        """Least picoseconds in which the CTAs can finish.

        Args:
            loads: picoseconds of each role's work, on one CTA.
            active: CTAs that may get work.
        """
        return max(-(-loads[1] // min(self.saturating, active)), -(-sum(loads) // active))


@dataclass(frozen=True)
class RoleWork:
    """The work of one role in one plan.

    Attributes:
        role: the role with its tile.
        segments: number of its segments; those without rows do not count.
        items: number of work items.
        ctas: CTAs that have their own list of these items.
        shared: lists that CTAs claim after their own: any CTA claims prefills, only decoding CTAs
            claim decodes.
    """

    role: Role
    segments: int
    items: int
    ctas: int
    shared: int


def check_roles(roles: Sequence[Role], prices: RolePrices | None) -> None:
    """Refuses roles that rows cannot tell apart, and two roles without prices.

    Raises:
        ArgumentError: sizes below 1, rows that do not fall from role to role, more than two roles,
            or prices that are missing or below 1.
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
    if len(roles) > _MOST:
        raise ArgumentError(name="roles", reason=f"are {len(roles)}; expected {_MOST} at most")
    if len(roles) > 1 and (prices is None or prices.least < 1):
        reason = f"are {prices}; two roles need some of at least 1"
        raise ArgumentError(name="prices", reason=reason)


def check_ctas(num_ctas: int, num_roles: int) -> None:
    """Raises ArgumentError for more CTAs of two roles than one counter holds."""
    if num_roles > 1 and num_ctas > MOST_CTAS:
        reason = f"is {num_ctas}; plans of two roles have at most {MOST_CTAS}"
        raise ArgumentError(name="num_ctas", reason=reason)


def roles_of(segments: Records, group_size: int, roles: Sequence[Role]) -> Ints:
    """The index of each segment's role.

    Args:
        segments: SEGMENT records, shape (n,).
        group_size: query heads of each key/value head.
        roles: the one with the most rows first.

    Returns:
        (n,) indices into `roles`.
    """
    return role_of_rows(segments["num_q"].astype(np.int64) * group_size, roles)


def role_of_rows(rows: Ints, roles: Sequence[Role]) -> Ints:
    """Index of the role with the fewest rows whose tile holds the rows; else of the largest role.

    Args:
        rows: (n,) fused rows.
        roles: the one with the most rows first.

    Returns:
        (n,) indices into `roles`.
    """
    found = np.zeros(len(rows), np.int64)
    for number, role in enumerate(roles[1:], 1):
        found[rows <= role.rows] = number
    return found


def split_of(size: int, keys: int) -> int:
    """`size` rounded up to key tiles of `keys` keys: a role is cut at multiples of this."""
    return -(-size // keys) * keys


def num_lists(num_ctas: int, num_roles: int) -> int:
    """Number of item lists of a plan: one per CTA, or with two roles as ROLE_OF_LISTS says."""
    return num_ctas if num_roles == 1 else num_ctas * ROLE_LISTS


def most_cuts(num_ctas: int, num_roles: int) -> int:
    """Most boundaries within lines; each may cut an item.

    With two roles they separate ENDS ends, or two equal parts, per prefilling CTA, and one own
    slice and ENDS ends per decoding CTA. There are most of them if a single CTA prefills.
    """
    return num_ctas - 1 if num_roles == 1 else (1 + ENDS) * num_ctas - ENDS
