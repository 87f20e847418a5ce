"""What is to be planned, and what planning gives: the two ends of both planners."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from warploom.scheduler.cost import CostModel
from warploom.scheduler.layout import Ints, Records
from warploom.scheduler.visibility import Visibility

# Order and limit are kept to 1/TOLERANCE of the mean load, so that tiles of like cost may stay in
# the order of their heads and rows: neighbours in time then read the same keys.
TOLERANCE = 64
# Tiles are cut only if some CTA is loaded 1/WORTH_CUTTING above the mean: merging costs something
# too.
WORTH_CUTTING = 16


@dataclass(frozen=True)
class Problem:
    """One batch and the machine it is planned for; all numbers are checked.

    Attributes:
        segments: SEGMENT records.
        rows, keys: tile sizes.
        num_ctas: CTAs of the grid.
        active_ctas: how many of them may get work; the first ones (FlashInfer, appendix E).
        split_size: keys at whose multiples every tile is cut, or None: cut to balance the load.
        section_keys: keys of one head that the cache holds, or None: all. See `sections`.
        even: deal by `even` instead of longest first; neither split nor sections then.
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
    even: bool = False

    @property
    def cost_model(self) -> CostModel:
        model = CostModel.for_even if self.even else CostModel.of
        return model(self.rows, self.keys)


def sections(problem: Problem, segment: Ints, head: Ints) -> Ints:
    """Which part of the batch the keys of a (segment, head) belong to; parts fit the cache.

    Items are dealt section by section: tiles that read the same keys then run at the same time,
    and find them in the cache. Without it, the longest tiles of all heads come first, and each CTA
    reads the keys of another head (FlashAttention-3 swizzles heads for this reason).

    Args:
        segment: (n,) segments.
        head: (n,) key/value heads.

    Returns:
        (n,) sections, not descending in (segment, head).
    """
    if problem.section_keys is None:
        return np.zeros(len(segment), np.int64)
    count = problem.segments["kv_count"].astype(np.int64)
    before = (np.cumsum(count) - count) * problem.num_kv_heads
    return (before[segment] + head * count[segment]) // problem.section_keys


@dataclass(frozen=True)
class WorkList:
    """Work of every CTA.

    Attributes:
        cta_indptr: int32 (num_ctas + 1,); CTA i runs items cta_indptr[i] .. cta_indptr[i + 1] - 1.
        items: WORK_ITEM records. Each CTA's partial items come first, then the others, both in the
            order in which they were dealt.
        merges: MERGE records.
        loads: (num_ctas,) modelled cost of each CTA.
    """

    cta_indptr: npt.NDArray[np.int32]
    items: Records
    merges: Records
    loads: Ints

    @property
    def num_slots(self) -> int:
        return int(self.merges["num_slots"].sum())


def by_cta(items: Records, merges: Records, cta: Ints, cost: Ints, num_ctas: int) -> WorkList:
    """Sorts items by CTA. Partial ones come first, so that merges hide behind later work.

    Args:
        items: (n,) records, each CTA's in order.
        merges: records.
        cta, cost: (n,) the CTA of each item, and its cost.
        num_ctas: CTAs of the grid.
    """
    key = 2 * cta + (items["slot"] < 0)
    if num_ctas < 2**15:
        key = key.astype(np.uint16)
    indptr = np.zeros(num_ctas + 1, np.int32)
    np.cumsum(np.bincount(cta, minlength=num_ctas), out=indptr[1:])
    loads = np.bincount(cta, weights=cost, minlength=num_ctas).astype(np.int64)
    return WorkList(indptr, items.take(np.argsort(key, kind="stable")), merges, loads)
