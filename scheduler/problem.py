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
    """

    segments: Records
    num_kv_heads: int
    group_size: int
    rows: int
    keys: int
    num_ctas: int
    active_ctas: int
    visibility: Visibility
    split_size: int | None
    section_keys: int | None = None

    @property
    def cost_model(self) -> CostModel:
        return CostModel.of(self.rows, self.keys)


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
