"""The result of a partition: items and pieces of items, with the CTA of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from warploom.scheduler.model.layout import MERGE, WORK_ITEM, Ints, Records


@dataclass(frozen=True)
class Pieces:
    """Items and pieces of items, shape (n,) each but for the merges.

    Attributes:
        items: WORK_ITEM records; those from a line are in the order of the line.
        merges: MERGE records.
        owner: CTA of each item, counted from the first CTA of this partition.
        cost: modelled cost of each item.
    """

    items: Records
    merges: Records
    owner: Ints
    cost: Ints

    @classmethod
    def none(cls) -> Pieces:
        nothing = np.zeros(0, np.int64)
        return cls(np.zeros(0, WORK_ITEM.dtype), np.zeros(0, MERGE.dtype), nothing, nothing)
