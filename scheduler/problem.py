"""What is to be planned, and what planning gives: the two ends of both planners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from warploom.scheduler.cost import CostModel
from warploom.scheduler.layout import Ints, Records
from warploom.scheduler.roles import FIRST, Role, roles_of
from warploom.scheduler.visibility import Visibility, visible_tiles

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
        rows, keys: tile sizes; of the role with the most rows, if there are several.
        num_ctas: CTAs of the grid.
        active_ctas: how many of them may get work; the first ones (FlashInfer, appendix E).
        split_size: keys at whose multiples every tile is cut, or None: cut to balance the load.
        section_keys: keys of one head that the cache holds, or None: all. See `sections`.
        stream_k: assign by `stream_k` instead of longest first; neither split nor sections then.
        smaller: the other roles, by falling rows; partitioned by Stream-K then.
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

    @property
    def cost_model(self) -> CostModel:
        """Of the one tile."""
        model = CostModel.for_stream_k if self.stream_k else CostModel.of
        return model(self.rows, self.keys)

    @cached_property
    def cost_models(self) -> tuple[CostModel, ...]:
        """Of each role, all in one unit."""
        if not self.smaller:
            return (self.cost_model,)
        return CostModel.of_roles([(role.rows, role.keys) for role in self.roles])

    @property
    def roles(self) -> tuple[Role, ...]:
        """All of them, the one with the most rows first."""
        return (Role(FIRST, self.rows, self.keys), *self.smaller)

    @cached_property
    def role(self) -> Ints:
        """(segments,) the role of each."""
        return roles_of(self.segments, self.group_size, self.roles)

    def of_roles(self, values: Sequence[int], segment: Ints) -> Ints:
        """(n,) what segments have by their role, of one value for each role."""
        found: Ints = np.array(values, np.int64)[self.role[segment]]
        return found

    def keys_of(self, segment: Ints) -> Ints:
        """(n,) keys of the tiles of these segments."""
        return self.of_roles([role.keys for role in self.roles], segment)

    def visible_tiles(
        self, segment: Ints, row_begin: Ints, row_end: Ints, kv_begin: Ints, kv_end: Ints
    ) -> Ints:
        """(n,) key tiles that are not skipped, each segment's of its own size; see `Visibility`."""
        where = (segment, row_begin, row_end, kv_begin, kv_end)
        return visible_tiles(self.visibility, self.roles, self.role[segment], where)

    def cost_of(self, segment: Ints, visible: Ints) -> Ints:
        """(n,) costs of chunks of these segments with so many visible key tiles."""
        models = self.cost_models
        fixed = self.of_roles([model.fixed for model in models], segment)
        return fixed + self.of_roles([model.per_tile for model in models], segment) * visible


def sections(problem: Problem, segment: Ints, head: Ints) -> Ints:
    """Which part of the batch the keys of a (segment, head) belong to; parts fit the cache.

    Items are assigned section by section: tiles that read the same keys then run at the same time,
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
            order in which they were assigned.
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
