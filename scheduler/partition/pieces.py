"""What partitions give to CTAs: items, or parts of some."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from warploom.scheduler.model.layout import MERGE, WORK_ITEM, Ints, Records


@dataclass(frozen=True)
class Pieces:
    """Items and pieces of items, shape (n,) each but for the merges.

    Attributes:
        items: WORK_ITEM records; in the order of lines, if they lay on some.
        merges: MERGE records.
        owner: which CTA has each, counted from the first that works on them.
        cost: of each.
    """

    items: Records
    merges: Records
    owner: Ints
    cost: Ints

    @classmethod
    def none(cls) -> Pieces:
        nothing = np.zeros(0, np.int64)
        return cls(np.zeros(0, WORK_ITEM.dtype), np.zeros(0, MERGE.dtype), nothing, nothing)
