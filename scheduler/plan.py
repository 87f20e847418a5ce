"""Plans: the work of every CTA for one batch, as arrays and as one buffer of fixed layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from warploom.errors import ArgumentError, CapacityExceeded, WorkspaceTooSmall, WrongDType
from warploom.scheduler import worklist
from warploom.scheduler.bounds import Bounds, check_segments
from warploom.scheduler.capacity import Capacity, WorkspaceSize, capacity, workspace_size
from warploom.scheduler.layout import HEADER, OPENING, ROLE_HEADER, SEGMENT, Ints, Records
from warploom.scheduler.problem import Problem, WorkList
from warploom.scheduler.roles import (
    FIRST,
    ROLE_OF_LISTS,
    SHARED_DECODES,
    SHARED_PREFILLS,
    Role,
    RolePrices,
    RoleWork,
    check_roles,
    lists_of,
    roles_of,
)
from warploom.scheduler.visibility import AllVisible, Visibility

__all__ = [
    "AllVisible",
    "Bounds",
    "Capacity",
    "Plan",
    "Visibility",
    "WorkspaceSize",
    "capacity",
    "make_plan",
    "workspace_size",
]


@dataclass(frozen=True, eq=False)
class Plan:
    """Work of every CTA for one batch (FlashInfer, section 3.3.1).

    Attributes:
        header: HEADER record, shape (1,); ROLE_HEADER if there are two roles.
        cta_indptr: int32 (lists + 1,); list i has items cta_indptr[i] .. cta_indptr[i + 1] - 1.
            CTA i runs list i; those of two roles have more, see `role_lists`.
        items: WORK_ITEM records; ROLE_ITEM if there are two roles. A list's partial items come
            first, so that merging hides behind the rest; both kinds are in the order in which they
            were assigned.
        segments: SEGMENT records.
        merges: MERGE records, one for each tile that was split.
        indices: int32, the block list of indexed formats; empty for others.
        loads: int64 (lists,) modelled cost of each list, in the units of `cost.CostModel`, or if
            there are two roles, of their prices.
        rows, keys: tile sizes; of the role with the most rows, if there are two. A partial slot
            has room for so many rows.
        num_ctas: CTAs of the grid; `active_ctas` of them may have work.
        split_size: keys at whose multiples tiles were cut; None: cut to balance the load.
        stream_k: assigned by `stream_k`, not the longest first.
        smaller: the other role; none if all rows have one tile.
        prices: what work of each role costs, if there are two.
    """

    header: Records
    cta_indptr: npt.NDArray[np.int32]
    items: Records
    segments: Records
    merges: Records
    indices: npt.NDArray[np.int32]
    loads: Ints
    num_kv_heads: int
    group_size: int
    rows: int
    keys: int
    num_ctas: int
    active_ctas: int
    split_size: int | None
    stream_k: bool = False
    smaller: tuple[Role, ...] = ()
    prices: RolePrices | None = None

    @classmethod
    def of(cls, problem: Problem, work: WorkList, indices: npt.NDArray[np.int32]) -> Plan:
        """Joins what was asked and what a planner found."""
        counts = len(work.items), len(problem.segments), len(work.merges), work.num_slots, 0
        shared = work.num_decodes, work.num_shared_decodes
        of_roles = work.num_shared, problem.active_ctas, *shared, 0, 0, 0
        if problem.smaller:
            header = np.array([counts + of_roles], ROLE_HEADER.dtype)
        else:
            header = np.array([counts], HEADER.dtype)
        return cls(
            header=header,
            cta_indptr=work.cta_indptr,
            items=work.items,
            segments=problem.segments,
            merges=work.merges,
            indices=indices,
            loads=work.loads,
            num_kv_heads=problem.num_kv_heads,
            group_size=problem.group_size,
            rows=problem.rows,
            keys=problem.keys,
            num_ctas=problem.num_ctas,
            active_ctas=problem.active_ctas,
            split_size=problem.split_size,
            stream_k=problem.stream_k,
            smaller=problem.smaller,
            prices=problem.prices,
        )

    @property
    def roles(self) -> tuple[Role, ...]:
        """All of them, the one with the most rows first."""
        return (Role(FIRST, self.rows, self.keys), *self.smaller)

    @property
    def role(self) -> Ints:
        """(items,) the role of each."""
        if not self.smaller:
            return np.zeros(len(self.items), np.int64)
        return self.items["role"].astype(np.int64)

    @property
    def num_slots(self) -> int:
        """Partial slots in use."""
        return int(self.header["num_slots"][0])

    @property
    def num_shared(self) -> int:
        """Lists of prefills that any CTA may claim."""
        return int(self.header["num_shared"][0]) if self.smaller else 0

    @property
    def num_shared_decodes(self) -> int:
        """Lists of decodes that decoding CTAs may claim."""
        return int(self.header["num_shared_decodes"][0]) if self.smaller else 0

    @property
    def num_lists(self) -> int:
        """All lists, those without items, too."""
        return lists_of(self.num_ctas, len(self.roles))

    def _owned(self, lists: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(roles, num_ctas) of values of lists: those that CTAs have for their own."""
        return lists[: len(self.roles) * self.num_ctas].reshape(-1, self.num_ctas)

    @property
    def busy_ctas(self) -> int:
        """CTAs that have work of their own."""
        return int(np.count_nonzero(self._owned(np.diff(self.cta_indptr)).any(axis=0)))

    @property
    def balance(self) -> float:
        """Largest load over the mean of the active CTAs: 1 is perfect, and 1 without work.

        Shared lists go to the CTA that is done first, of those that may claim them.
        """
        mean = float(self.loads.sum()) / self.active_ctas
        own, ctas = self._owned(self.loads)[:, : self.active_ctas], self.num_ctas
        done = own[-1].copy()
        if self.smaller:
            decoding = done[: int(self.header["num_decodes"][0])]
            for load in self.loads[SHARED_DECODES * ctas :][: self.num_shared_decodes]:
                decoding[decoding.argmin()] += load
            done += own[0]
            for load in self.loads[SHARED_PREFILLS * ctas :][: self.num_shared]:
                done[done.argmin()] += load
        return float(done.max()) / mean if mean else 1.0

    @property
    def predicted_seconds(self) -> float | None:
        """How long the prices say that two roles take; None for one role."""
        if self.prices is None:
            return None
        of_lists = np.repeat(ROLE_OF_LISTS, self.num_ctas)
        loads = [int(self.loads[of_lists == role].sum()) for role in range(len(self.roles))]
        return self.prices.time(loads, self.active_ctas) / 1e12

    def work_of_roles(self) -> tuple[RoleWork, ...]:
        """What each role has to do; one without work is told, too."""
        has = self._owned(np.diff(self.cta_indptr)) > 0
        busy = roles_of(self.segments, self.group_size, self.roles)[self.segments["num_q"] > 0]
        return tuple(
            RoleWork(
                role=role,
                segments=int((busy == number).sum()),
                items=int((self.role == number).sum()),
                ctas=int(has[number].sum()),
                shared=self.num_shared_decodes if number else self.num_shared,
            )
            for number, role in enumerate(self.roles)
        )

    def openings(self) -> Records:
        """OPENING records, one for each list; zeros where a list has no items."""
        openings = np.zeros(self.num_lists, OPENING)
        busy = self.cta_indptr[1:] > self.cta_indptr[:-1]
        items = self.items[self.cta_indptr[:-1][busy]]
        openings["item"][busy] = items
        openings["segment"][busy] = self.segments[items["segment"]]
        return openings

    def sections(self) -> dict[str, npt.NDArray[np.int32]]:
        """Section name -> its int32 contents, in the order of the buffer."""
        return {
            "header": self.header.view(np.int32),
            "cta_indptr": self.cta_indptr,
            "openings": self.openings().view(np.int32),
            "segments": self.segments.view(np.int32),
            "merges": self.merges.view(np.int32),
            "items": self.items.view(np.int32),
            "indices": self.indices,
        }

    def pack(
        self, capacity: Capacity, out: npt.NDArray[np.int32] | None = None
    ) -> npt.NDArray[np.int32]:
        """Writes the plan into one buffer, each section at its fixed offset.

        What lies behind a section's used part is left as it is; a kernel never reads it, because
        the header and `cta_indptr` are always written whole.

        Args:
            capacity: the layout.
            out: int32, at least `capacity.total_ints` long; None allocates zeros.

        Returns:
            int32 (capacity.total_ints,), a view of `out`.

        Raises:
            CapacityExceeded: a section does not fit. Nothing was written.
            WorkspaceTooSmall: `out` is too short. Nothing was written.
        """
        self.check_fits(capacity)
        if out is None:
            out = np.zeros(capacity.total_ints, np.int32)
        if out.dtype != np.int32:
            raise WrongDType(name="out", got=out.dtype, expected="int32")
        if len(out) < capacity.total_ints:
            raise WorkspaceTooSmall(got=4 * len(out), needed=4 * capacity.total_ints)
        for name, content in self.sections().items():
            start = capacity.offsets[name]
            out[start : start + len(content)] = content
        return out[: capacity.total_ints]

    def check_fits(self, capacity: Capacity) -> None:
        """Raises CapacityExceeded, naming the section, unless the plan fits the capacity."""
        pairs = (
            ("work items", len(self.items), capacity.max_items),
            ("segments", len(self.segments), capacity.max_segments),
            ("merges", len(self.merges), capacity.max_merges),
            ("partial slots", self.num_slots, capacity.max_slots),
            ("block indices", len(self.indices), capacity.max_indices),
        )
        for name, got, bound in pairs:
            if got > bound:
                raise CapacityExceeded(name=name, got=got, bound=bound)
        if len(self.roles) != capacity.num_roles:
            got, bound = len(self.roles), capacity.num_roles
            raise CapacityExceeded(name="roles", got=got, bound=bound)
        if self.num_ctas != capacity.num_ctas:
            raise CapacityExceeded(name="CTAs", got=self.num_ctas, bound=capacity.num_ctas)


def make_plan(
    segments: Records,
    *,
    num_kv_heads: int,
    group_size: int,
    rows: int,
    keys: int,
    num_ctas: int,
    visibility: Visibility,
    capacity: Capacity | None = None,
    sm_limit: int | None = None,
    split_size: int | None = None,
    section_keys: int | None = None,
    stream_k: bool = False,
    indices: npt.NDArray[np.int32] | None = None,
    smaller: tuple[Role, ...] = (),
    prices: RolePrices | None = None,
    piece_keys: int = 0,
) -> Plan:
    """Plans one batch: who computes what, and where partial results are merged.

    Deterministic: the same arguments give the same bits. Host only; nothing is written outside the
    returned arrays.

    Args:
        segments: SEGMENT records, shape (n,); n may be 0.
        num_kv_heads, group_size: key/value heads, and query heads of each.
        rows, keys: tile sizes; of the role with the most rows, if there are two.
        num_ctas: CTAs of the grid.
        visibility: the mask's answers for these segments.
        capacity: what the plan must fit; None: no limit.
        sm_limit: CTAs that may get work, the first ones (FlashInfer, appendix E); None: all.
        split_size: cut every tile's keys at multiples of this, a multiple of `keys`. The bits of a
            request then never depend on the batch, `num_ctas` or `sm_limit`. None: cut to balance.
        section_keys: keys of one head whose keys and values the device's cache holds; tiles that
            share keys are then run at the same time. None: the order of costs alone.
        stream_k: cut the line of all items at multiples of the mean load (`scheduler.stream_k`)
            instead of assigning the longest first. Excludes `split_size` and `section_keys`.
        indices: int32 block list, for indexed formats.
        smaller: another role, for segments whose rows its tile holds; see `scheduler.roles`. Such
            plans are partitioned by Stream-K (`scheduler.role_lists`), whatever `stream_k` says,
            and exclude what that excludes.
        prices: what work of each role costs; needed where there are two.
        piece_keys: keys that a CTA could compute with while it opens a piece of a tile, writes its
            partial result and merges; for plans that are assigned longest first.

    Raises:
        BoundsExceeded: the batch passes a declared bound (both numbers are named).
        CapacityExceeded: the capacity was computed for other sizes, heads or CTAs.
        BadLength: a segment's field is negative or too large for int32 positions.
        ArgumentError: a number is out of its range.
    """
    active = _check_numbers(num_kv_heads, group_size, rows, keys, num_ctas, sm_limit, split_size)
    if section_keys is not None and section_keys < 1:
        raise ArgumentError(name="section_keys", reason=f"is {section_keys}; expected at least 1")
    check_roles((Role(FIRST, rows, keys), *smaller), prices)
    stream_k = stream_k or bool(smaller)
    if stream_k and (split_size is not None or section_keys is not None):
        name = "smaller" if smaller else "stream_k"
        raise ArgumentError(name=name, reason="excludes split_size and section_keys")
    if segments.dtype != SEGMENT.dtype:
        raise WrongDType(name="segments", got=segments.dtype, expected="layout.SEGMENT.dtype")
    segments = np.ascontiguousarray(segments)
    indices = np.zeros(0, np.int32) if indices is None else indices
    if indices.dtype != np.int32:
        raise WrongDType(name="indices", got=indices.dtype, expected="int32")
    check_segments(segments, group_size)
    if capacity is not None:
        capacity.bounds.admit(segments, len(indices))
    problem = Problem(
        segments, num_kv_heads, group_size, rows, keys, num_ctas, active, visibility, split_size,
        section_keys, stream_k, smaller, prices if smaller else None, piece_keys=piece_keys,
    )  # fmt: skip
    plan = Plan.of(problem, worklist.build(problem), indices)
    if capacity is not None:
        plan.check_fits(capacity)
    return plan


def _check_numbers(
    num_kv_heads: int,
    group_size: int,
    rows: int,
    keys: int,
    num_ctas: int,
    sm_limit: int | None,
    split_size: int | None,
) -> int:
    """Refuses numbers that make no sense; returns how many CTAs may get work."""
    numbers = {
        "num_kv_heads": num_kv_heads,
        "group_size": group_size,
        "rows": rows,
        "keys": keys,
        "num_ctas": num_ctas,
        "sm_limit": 1 if sm_limit is None else sm_limit,
    }
    for name, value in numbers.items():
        if value < 1:
            raise ArgumentError(name=name, reason=f"is {value}; expected at least 1")
    if split_size is not None and (split_size < keys or split_size % keys):
        reason = f"is {split_size}; expected a positive multiple of the key tile, {keys}"
        raise ArgumentError(name="split_size", reason=reason)
    return num_ctas if sm_limit is None else min(sm_limit, num_ctas)
