"""Roles: what CTAs of one pass do, each with a tile of its own, such as prefill and decode.

A segment takes the role with the fewest rows whose tile holds all of its rows, and else the one
with the most. So a segment has as many query tiles as if all had the largest tile, and capacities
of one tile hold for both (decision 0040). Which CTAs take which role, and what they find to do
when they are done, is decision 0043.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from warploom.errors import ArgumentError
from warploom.scheduler.model.cost import OPENING, CostModel
from warploom.scheduler.model.layout import Ints, Records

FIRST = "prefill"  # what the role with the most rows is called
_MOST = 2  # roles of a plan
# One counter of 32 bits holds how many CTAs have drawn a number from either end (hopper/roles.cuh).
MOST_CTAS = 2**16 - 1
ROUNDS = 4  # of whole prefills, at most: the first for CTAs of their own, the others to be claimed
ENDS = 3  # lengths of shared lists behind others, at most, each half of the one before
# The role of each num_ctas lists of a plan: those that CTAs have for their own, which any CTA
# claims (rounds, then ends; or whole prefills; or pieces), and which decoding ones do.
ROLE_OF_LISTS = (0, 1, *(0,) * (ROUNDS - 1 + ENDS), *(1,) * ENDS)
SLICES = (ROUNDS + ENDS, 1 + ENDS)  # of each role's lines for each CTA, at most
SHARED_PREFILLS, SHARED_DECODES = 2, len(ROLE_OF_LISTS) - ENDS  # where these begin

# On an H200 a piece of a prefill costs about 10 us, to open, to write as a partial result and to
# merge: as much as 800 keys, and if prefills are cut, a CTA has two. If not, the CTA that is done
# last has half a prefill more than the mean, or, of fewer than CTAs, what it has beyond the mean.
SHORTEST_CUT = 4096  # keys
LATE = 8  # 1 of so many of these may be beyond the mean
PER_IDLE_PREFILL = 4  # of CTAs that neither role needs 1 of so many prefills (decision 0043)


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
class RolePrices:
    """What the work of two roles costs, so that CTAs can be shared out.

    Attributes:
        units: picoseconds that one CTA takes for one unit of each role's `CostModel`, in the order
            of the roles. Where nobody asks for the time of a plan, they may have another unit.
        saturating: CTAs of the last role that together read as fast as memory lets them.
        claim: keys of the shortest list of the last role that is worth claiming. The default is a
            guess: several times what a CTA could read while it opens one.
        cached_keys: keys of one head that the cache holds; None: all that a batch may have.
        shortest_cut: keys of the shortest item of the first role that is cut, in key tiles begun.
            So are those that are 1 / LATE of it longer than a CTA's equal slice of all items.
        deals: whether a host may deal prefills beside decodes (decision 0062), which leaves less to
            be claimed: where the price of a prefill is known.
    """

    units: tuple[int, int]
    saturating: int
    claim: int = 8 * OPENING
    cached_keys: int | None = None
    shortest_cut: int = SHORTEST_CUT
    deals: bool = True

    @property
    def least(self) -> int:
        """The smallest of its numbers, none of which makes sense below 1."""
        known = () if self.cached_keys is None else (self.cached_keys,)
        return min(*self.units, self.saturating, self.claim, self.shortest_cut, *known)

    @classmethod
    def of_tiles(
        cls,
        roles: Sequence[Role],
        tiles: Sequence[int],
        saturating: int,
        cached_keys: int | None = None,
        deals: bool = True,
    ) -> RolePrices:
        """From what one key tile of each role costs, rounded up.

        Args:
            roles: two.
            tiles: price of a key tile of each.
            saturating, cached_keys, deals: see the attributes.
        """
        first, second = (
            -(-price // CostModel.for_stream_k(role.rows, role.keys).per_tile)
            for role, price in zip(roles, tiles, strict=True)
        )
        return cls((first, second), saturating, cached_keys=cached_keys, deals=deals)

    def ctas(self, work: Sequence[int], active: int) -> tuple[int, int]:
        """How many of the CTAs that may get work take each role.

        If work could be cut anywhere, all would be done in T = max(decode / saturating, all /
        active): decodes on more CTAs than saturate memory are no faster. Where memory is the limit
        neither role needs all of the other CTAs. Of these idle ones prefills get a quarter and
        decodes the rest, since either may be slower beside the other than its price says; and
        prefills have at least half of the CTAs that do not saturate memory. Else decodes get the
        part of a CTA that is left over: who is done with them prefills, and who prefills never
        decodes. With a single CTA it has both roles.

        Args:
            work: cost of all items of each role, in units of its cost model.
            active: CTAs.
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
            model: of its tile.
            keys: of its tile.
        """
        return max(model.least_slice, model.per_tile * -(-self.claim // keys))

    def cut_tiles(self, keys: int) -> int:
        """`shortest_cut` in tiles of so many keys."""
        return -(-self.shortest_cut // keys)

    def time(self, loads: Sequence[int], active: int) -> int:
        """Picoseconds in which CTAs are done at best.

        Args:
            loads: picoseconds of each role's work, on one CTA.
            active: CTAs.
        """
        return max(-(-loads[1] // min(self.saturating, active)), -(-sum(loads) // active))


@dataclass(frozen=True)
class RoleWork:
    """What a role has to do in one plan.

    Attributes:
        role: with its tile.
        segments: whose rows it takes; those without rows are left out.
        items: work items.
        ctas: CTAs that have a list of them for their own.
        shared: lists that CTAs claim when they are done: any CTA prefills, decoding ones decodes.
    """

    role: Role
    segments: int
    items: int
    ctas: int
    shared: int


def check_roles(roles: Sequence[Role], prices: RolePrices | None) -> None:
    """Refuses roles that no rule could tell apart, and roles without prices.

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
    """The index of the role with the fewest rows whose tile holds so many, or of the largest.

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
    """The keys at whose multiples a role is cut: `size`, rounded up to its tiles of `keys`."""
    return -(-size // keys) * keys


def num_lists(num_ctas: int, num_roles: int) -> int:
    """Lists of items that a plan has: one for each CTA, or by ROLE_OF_LISTS.

    C++: templates/common/warploom/role_lists.hpp.
    """
    return num_ctas if num_roles == 1 else num_ctas * len(ROLE_OF_LISTS)


def most_cuts(num_ctas: int, num_roles: int) -> int:
    """Boundaries within lines, each of which may cut an item.

    With two roles they lie between ENDS ends of each CTA that prefills, or two equal parts, and
    between its own decodes and ENDS ends of each that decodes: most are cut if one prefills.
    """
    return num_ctas - 1 if num_roles == 1 else (1 + ENDS) * num_ctas - ENDS
