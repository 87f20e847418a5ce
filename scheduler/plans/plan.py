"""Plans: the work of every CTA for one batch, as arrays and as one buffer of fixed layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from warploom.errors import CapacityExceeded, WorkspaceTooSmall, WrongDType
from warploom.scheduler.model.layout import (
    HEADER,
    OPENING,
    ROLE_HEADER,
    ROLE_OF_LISTS,
    SHARED_DECODES,
    SHARED_PREFILLS,
    Ints,
    Records,
)
from warploom.scheduler.model.problem import Problem, WorkList
from warploom.scheduler.model.roles import RoleWork, num_lists
from warploom.scheduler.partition import worklist
from warploom.scheduler.plans.capacity import Capacity


@dataclass(frozen=True, eq=False)
class Plan:
    """Work of every CTA for one batch (FlashInfer, section 3.3.1).

    Attributes:
        header: HEADER record, shape (1,); with two roles ROLE_HEADER.
        cta_indptr: int32 (lists + 1,); list i has items cta_indptr[i] .. cta_indptr[i + 1] - 1.
            CTA i runs list i; with two roles there are more lists, see `role_lists`.
        items: WORK_ITEM records; with two roles ROLE_ITEM, except in composed plans. In a composed
            plan a list's items are in any order; else partial items come first, so that merges hide
            behind the others, and both kinds are in the order in which they were assigned.
        segments: SEGMENT records.
        merges: MERGE records, one for each tile that was split.
        indices: int32, the block list of indexed formats; empty for others.
        loads: int64 (lists,) modelled cost of each list, in the units of `cost.CostModel`, or with
            two roles, of their prices.
        problem: what was planned. Its segments are the requests in a composed plan, whose own
            segments are parts. A partial slot has room for the problem's `rows`.
    """

    header: Records
    cta_indptr: npt.NDArray[np.int32]
    items: Records
    segments: Records
    merges: Records
    indices: npt.NDArray[np.int32]
    loads: Ints
    problem: Problem

    @classmethod
    def of(cls, problem: Problem, work: WorkList, indices: npt.NDArray[np.int32]) -> Plan:
        """Joins a problem and a planner's result."""
        counts = len(work.items), len(problem.segments), len(work.merges), work.num_slots, 0
        return cls(
            header_of(counts, problem, work), work.cta_indptr, work.items,
            np.ascontiguousarray(problem.segments), work.merges, indices, work.loads, problem,
        )  # fmt: skip

    @property
    def role(self) -> Ints:
        """(items,) role of each item."""
        if not self.problem.smaller:
            return np.zeros(len(self.items), np.int64)
        return self.items["role"].astype(np.int64)

    @property
    def num_slots(self) -> int:
        """Partial slots in use."""
        return int(self.header["num_slots"][0])

    @property
    def num_shared_prefills(self) -> int:
        """Lists of prefills that any CTA may claim."""
        return int(self.header["num_shared_prefills"][0]) if self.problem.smaller else 0

    @property
    def num_shared_decodes(self) -> int:
        """Lists of decodes that decoding CTAs may claim."""
        return int(self.header["num_shared_decodes"][0]) if self.problem.smaller else 0

    @property
    def num_lists(self) -> int:
        """Number of all lists, empty ones included."""
        return num_lists(self.problem.num_ctas, len(self.problem.roles))

    def _owned(self, lists: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(roles, num_ctas) of one value per list: the values of the CTAs' own lists."""
        ctas = self.problem.num_ctas
        return lists[: len(self.problem.roles) * ctas].reshape(-1, ctas)

    @property
    def busy_ctas(self) -> int:
        """CTAs with a non-empty list of their own."""
        return int(np.count_nonzero(self._owned(np.diff(self.cta_indptr)).any(axis=0)))

    @property
    def balance(self) -> float:
        """Largest load over the mean of the active CTAs: 1 is perfect; 1 without work.

        Assumes that each shared list goes to the first CTA to finish of those that may claim it.
        """
        mean = float(self.loads.sum()) / self.problem.active_ctas
        own, ctas = self._owned(self.loads)[:, : self.problem.active_ctas], self.problem.num_ctas
        done = own[-1].copy()
        if self.problem.smaller:
            decoding = done[: int(self.header["num_decode_ctas"][0])]
            for load in self.loads[SHARED_DECODES * ctas :][: self.num_shared_decodes]:
                decoding[decoding.argmin()] += load
            done += own[0]
            for load in self.loads[SHARED_PREFILLS * ctas :][: self.num_shared_prefills]:
                done[done.argmin()] += load
        return float(done.max()) / mean if mean else 1.0

    @property
    def predicted_seconds(self) -> float | None:
        """Time of the plan by its prices; None for one role."""
        if self.problem.prices is None or not self.problem.smaller:
            return None
        of_lists = np.repeat(ROLE_OF_LISTS, self.problem.num_ctas)
        loads = [int(self.loads[of_lists == role].sum()) for role in range(len(self.problem.roles))]
        return self.problem.prices.time(loads, self.problem.active_ctas) / 1e12

    def work_of_roles(self) -> tuple[RoleWork, ...]:
        """The work of each role, also of a role without work."""
        has = self._owned(np.diff(self.cta_indptr)) > 0
        return tuple(
            RoleWork(
                role=role,
                segments=len(np.unique(self.items["segment"][self.role == number])),
                items=int((self.role == number).sum()),
                ctas=int(has[number].sum()),
                shared=self.num_shared_decodes if number else self.num_shared_prefills,
            )
            for number, role in enumerate(self.problem.roles)
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

        Bytes behind a section's used part are left as they are; a kernel never reads them, because
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
        if len(self.problem.roles) != capacity.num_roles:
            got, bound = len(self.problem.roles), capacity.num_roles
            raise CapacityExceeded(name="roles", got=got, bound=bound)
        if self.problem.num_ctas != capacity.num_ctas:
            raise CapacityExceeded(name="CTAs", got=self.problem.num_ctas, bound=capacity.num_ctas)


def header_of(counts: tuple[int, ...], problem: Problem, work: WorkList) -> Records:
    """The first record of a plan: HEADER, or with two roles ROLE_HEADER; shape (1,)."""
    if not problem.smaller:
        return np.array([counts], HEADER.dtype)
    shared = work.num_decode_ctas, work.num_shared_decodes
    of_roles = work.num_shared_prefills, problem.active_ctas, *shared, 0, 0, 0
    return np.array([counts + of_roles], ROLE_HEADER.dtype)


def make_plan(problem: Problem, indices: npt.NDArray[np.int32] | None = None) -> Plan:
    """Plans one batch: which CTA computes which items, and where partial results are merged.

    Deterministic: the same arguments give the same bits. Host only; nothing is written outside the
    returned arrays.

    Args:
        problem: the batch and the machine.
        indices: int32 block list, for indexed formats.

    Raises:
        ArgumentError, BadLength, WrongDType: see `Problem.check`.
    """
    indices = np.zeros(0, np.int32) if indices is None else indices
    if indices.dtype != np.int32:
        raise WrongDType(name="indices", got=indices.dtype, expected="int32")
    problem.check()
    return Plan.of(problem, worklist.build(problem), indices)
