"""The planner's input (`Problem`) and output (`WorkList`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from warploom.errors import ArgumentError, WrongDType
from warploom.scheduler.model.bounds import check_segments
from warploom.scheduler.model.constants import SHARING_TILES
from warploom.scheduler.model.cost import CostModel
from warploom.scheduler.model.layout import SEGMENT, Ints, Records
from warploom.scheduler.model.roles import FIRST, Role, RolePrices, check_roles, roles_of
from warploom.scheduler.model.visibility import Visibility


class Partition(Enum):
    """How the tiles of a plan are cut and assigned to CTAs."""

    FIXED = auto()  # cut at multiples of one size, then longest first; of one role or two
    LINES = auto()  # one role: a Stream-K partition cuts lines of tiles
    LONGEST_FIRST = auto()  # one role: dealt the longest first, then loads are levelled
    ROLES = auto()  # two roles: a line of prefills, and lines of decodes
    ROLES_DEALT = auto()  # two roles: the same, but prefills are dealt where that is better

    @property
    def has_roles(self) -> bool:
        """Whether native plans of it have two roles."""
        return self in (Partition.ROLES, Partition.ROLES_DEALT)

    @property
    def deals(self) -> bool:
        """Whether tiles, or prefills, may be dealt the longest first and then be cut."""
        return self in (Partition.LONGEST_FIRST, Partition.ROLES_DEALT)


@dataclass(frozen=True)
class Problem:
    """One batch and the machine it is planned for.

    Attributes:
        segments: SEGMENT records, shape (n,); n may be 0.
        num_kv_heads, group_size: key/value heads, and query heads of each.
        rows, keys: tile sizes; with two roles, of the role with the most rows.
        num_ctas: CTAs of the grid.
        active_ctas: how many of them may get work; the first ones (FlashInfer, appendix E).
        visibility: the mask's answers for the segments.
        split_size: cut every tile's keys at multiples of this, rounded up to the key tile of its
            role (`roles.split_of`). The bits of a request then never depend on the batch or the
            CTAs. None: cut to balance the load.
        section_keys: keys of one head that the device's cache holds; tiles that share keys are then
            run at the same time, see `sections`. None: order by cost alone.
        stream_k: cut the line of all items at multiples of the mean load (`partition.stream_k`)
            instead of assigning the longest first; excludes `split_size`, `section_keys` and two
            roles.
        smaller: the second role, for segments whose rows its tile holds; see `roles`. Plans of two
            roles are made by `partition.role_lists`, or cut at fixed multiples by
            `partition.role_chunks`; they have no sections.
        prices: what work of each role costs; required with two roles.
        may_deal: with two roles, prefills may be dealt to CTAs the longest first, instead of lying
            on a line, where that is better (`partition.dealt_prefills`).
        only: (n,) the segments to plan, in order; None: all.
        piece_keys: cost of a piece of a tile, in keys: what a CTA could compute while it opens the
            piece, writes its partial result and merges; for plans assigned longest first.
    """

    segments: Records
    num_kv_heads: int
    group_size: int
    rows: int
    keys: int
    num_ctas: int
    active_ctas: int
    visibility: Visibility
    split_size: int | None = None
    section_keys: int | None = None
    stream_k: bool = False
    smaller: tuple[Role, ...] = ()
    prices: RolePrices | None = None
    may_deal: bool = True
    only: Ints | None = None
    piece_keys: int = 0

    def check(self) -> None:
        """Refuses invalid numbers and combinations of options.

        Raises:
            BadLength: a segment's field is negative or too large for int32 positions.
            ArgumentError: a number is out of its range, or options exclude each other.
            WrongDType: segments are not SEGMENT records.
        """
        names = "num_kv_heads", "group_size", "rows", "keys", "num_ctas", "active_ctas"
        for name in (*names, "section_keys", "split_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(name=name, reason=f"is {value}; expected at least 1")
        if self.piece_keys < 0:
            raise ArgumentError(
                name="piece_keys", reason=f"is {self.piece_keys}; expected 0 or more"
            )
        if self.active_ctas > self.num_ctas:
            reason = f"is {self.active_ctas}; expected at most num_ctas, {self.num_ctas}"
            raise ArgumentError(name="active_ctas", reason=reason)
        check_roles(self.roles, self.prices)
        if self.smaller and (self.stream_k or self.section_keys is not None):
            raise ArgumentError(name="smaller", reason="excludes section_keys and stream_k")
        if self.stream_k and not (self.split_size is None and self.section_keys is None):
            raise ArgumentError(name="stream_k", reason="excludes split_size and section_keys")
        if self.segments.dtype != SEGMENT.dtype:
            expected = "layout.SEGMENT.dtype"
            raise WrongDType(name="segments", got=self.segments.dtype, expected=expected)
        check_segments(self.segments, self.group_size)

    @property
    def cost_model(self) -> CostModel:
        """Cost model of the one tile."""
        if self.stream_k:
            return CostModel.for_stream_k(self.rows, self.keys)
        return CostModel.of(self.rows, self.keys, self.piece_keys)

    @property
    def roles(self) -> tuple[Role, ...]:
        """All roles, the one with the most rows first."""
        return (Role(FIRST, self.rows, self.keys), *self.smaller)

    def assigned(self, partition: Partition) -> Problem:
        """This problem with tiles assigned in this way; of FIXED it has a `split_size`."""
        if self.smaller:
            return replace(self, may_deal=partition is not Partition.ROLES)
        return replace(self, stream_k=partition is Partition.LINES)

    def by_role(self) -> tuple[Problem, ...]:
        """The part of each role: a problem of one tile, in whose cost units prices are given."""
        found = roles_of(self.segments, self.group_size, self.roles)
        return tuple(
            replace(
                self, rows=role.rows, keys=role.keys, smaller=(), stream_k=True,
                only=np.flatnonzero(found == number),
            )
            for number, role in enumerate(self.roles)
        )  # fmt: skip


def tiles_share_keys(fused: int, rows: int, segments: int) -> bool:
    """Whether a segment has at least SHARING_TILES tiles on average; false without segments.

    Args:
        fused: fused rows of all segments.
        rows: rows of a tile.
        segments: number of segments.
    """
    return 0 < SHARING_TILES * rows * segments <= fused


def sections(problem: Problem, segment: Ints, head: Ints) -> Ints:
    """The section of each (segment, head): a part of the batch whose keys fit the cache.

    Items are assigned section by section: tiles that read the same keys then run at the same time,
    and find them in the cache. Without sections, the longest tiles of all heads come first, and
    each CTA reads the keys of another head (FlashAttention-3 swizzles heads for this reason).
    Sections have equal sizes: a small last one would leave some CTAs without work, and items of
    other CTAs would be cut for them.

    Args:
        segment: (n,) segments.
        head: (n,) key/value heads.

    Returns:
        (n,) sections, not descending in (segment, head).
    """
    if problem.section_keys is None:
        return np.zeros(len(segment), np.int64)
    count = problem.segments["kv_count"].astype(np.int64)
    total = max(1, int(count.sum()) * problem.num_kv_heads)
    length = -(-total // -(-total // problem.section_keys))
    before = (np.cumsum(count) - count) * problem.num_kv_heads
    return (before[segment] + head * count[segment]) // length


@dataclass(frozen=True)
class WorkList:
    """Work of every list. With one role each CTA has one list; with two see `role_lists`.

    Attributes:
        cta_indptr: int32 (lists + 1,); list i has items cta_indptr[i] .. cta_indptr[i + 1] - 1.
        items: WORK_ITEM or ROLE_ITEM records. Each list's partial items come first, then the
            others, both in the order in which they were assigned.
        merges: MERGE records.
        loads: (lists,) modelled cost of each; with two roles in picoseconds.
        num_shared_prefills: lists of prefills that any CTA may claim.
        num_decode_ctas: with two roles, CTAs that decode: the first ones.
        num_shared_decodes: lists of decodes that the decoding CTAs may claim.
    """

    cta_indptr: npt.NDArray[np.int32]
    items: Records
    merges: Records
    loads: Ints
    num_shared_prefills: int = 0
    num_decode_ctas: int = 0
    num_shared_decodes: int = 0

    @property
    def num_slots(self) -> int:
        return int(self.merges["num_slots"].sum())


def by_cta(items: Records, merges: Records, cta: Ints, cost: Ints, num_ctas: int) -> WorkList:
    """Sorts items by CTA. Partial items come first, so that later work hides their merges.

    Args:
        items: (n,) records, each CTA's in order.
        merges: records.
        cta, cost: (n,) CTA, or list, and cost of each item.
        num_ctas: CTAs of the grid, or lists of the plan.
    """
    key = 2 * cta + (items["slot"] < 0)
    if num_ctas < 2**15:
        key = key.astype(np.uint16)
    indptr, loads = ranges_and_loads(cta, cost, num_ctas)
    items = items.take(np.argsort(key, kind="stable"))
    return WorkList(indptr, items, merges, loads)


def ranges_and_loads(cta: Ints, cost: Ints, num_ctas: int) -> tuple[npt.NDArray[np.int32], Ints]:
    """Where each CTA's list begins and ends, int32 (num_ctas + 1,), and its cost, (num_ctas,).

    Args:
        cta, cost: (n,) see `by_cta`.
        num_ctas: CTAs of the grid, or lists of the plan.
    """
    indptr = np.zeros(num_ctas + 1, np.int32)
    np.cumsum(np.bincount(cta, minlength=num_ctas), out=indptr[1:])
    loads = np.bincount(cta, weights=cost, minlength=num_ctas).astype(np.int64)
    return indptr, loads
