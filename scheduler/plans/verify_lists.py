"""What the lists of every plan must satisfy, whatever its items are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from warploom.scheduler.model.constants import ENDS
from warploom.scheduler.model.layout import ROLE_OF_LISTS, SHARED_DECODES, SHARED_PREFILLS
from warploom.scheduler.plans.plan import Plan

Flags: TypeAlias = npt.NDArray[np.bool_]
Checks: TypeAlias = Iterator[tuple[Flags | bool | np.bool_, str]]


def check_lists(plan: Plan) -> Checks:
    """Lists hold all items once, and CTAs beyond the SM limit have none."""
    problem, indptr = plan.problem, plan.cta_indptr
    yield len(indptr) == plan.num_lists + 1, "cta_indptr has not an entry for each list, and one"
    yield indptr[0] == 0, "cta_indptr does not begin at 0"
    yield np.diff(indptr) >= 0, "cta_indptr decreases"
    yield indptr[-1] == len(plan.items), "cta_indptr does not end at the item count"
    owner = np.arange(len(problem.roles) * problem.num_ctas) % problem.num_ctas
    idle = np.diff(indptr)[: len(owner)] == 0
    yield idle | (owner < problem.active_ctas), "a CTA above the SM limit has work"
    yield len(plan.loads) == plan.num_lists, "loads do not count the lists"
    if problem.smaller:
        yield from _of_roles(plan)


def _of_roles(plan: Plan) -> Checks:
    """With two roles: a list has items of its role only, and a CTA runs each non-empty list."""
    problem, header, indptr = plan.problem, plan.header[0], plan.cta_indptr
    is_empty = np.diff(indptr) == 0
    yield header["num_active"] == problem.active_ctas, "the header miscounts active CTAs"
    ctas, decoding = problem.num_ctas, header["num_decode_ctas"]
    counts = np.array([plan.num_shared_prefills, plan.num_shared_decodes])
    claimed = np.split(is_empty, [SHARED_PREFILLS * ctas, SHARED_DECODES * ctas])[1:]
    most = np.array([len(claimed[0]), ENDS * decoding])
    yield (counts >= 0) & (counts <= most), "the header counts shared lists beyond all"
    for lists, count in zip(claimed, counts, strict=True):
        yield lists[count:], "a shared list that no CTA claims has work"
    behind = np.flatnonzero(~is_empty[ctas : 2 * ctas]) >= decoding
    yield ~behind, "a CTA behind those that the header says decode does"
    yield decoding <= problem.active_ctas, "more CTAs decode than may have work"
    for counter in ("claimed", "claimed_decodes", "drawn"):
        yield header[counter] == 0, "a counter of the header is not zero"
    number = np.searchsorted(indptr, np.arange(len(plan.items)), side="right") - 1
    listed = np.array(ROLE_OF_LISTS)[number // ctas]
    yield plan.role == listed, "an item lies in a list of another role"
