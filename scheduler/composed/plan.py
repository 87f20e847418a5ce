"""Composed plans as arrays, and the largest lengths of their sections."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from warploom.errors import ArgumentError, CapacityExceeded
from warploom.scheduler.composed.sharing import Choice
from warploom.scheduler.model.bounds import INT32_MAX, Bounds
from warploom.scheduler.model.layout import ROW_MERGE, UNIT, Ints, Records
from warploom.scheduler.model.roles import check_ctas, most_cuts, role_of_rows
from warploom.scheduler.plans.capacity import Capacity, max_query_tiles
from warploom.scheduler.plans.plan import Plan

MERGE_COUNTERS = 4  # CTAs that are done, rows that are taken, CTAs that have left, and 0


@dataclass(frozen=True, eq=False, kw_only=True)
class ComposedPlan(Plan):
    """A plan whose tiles hold rows of several requests; see `composed`.

    `segments` are parts, `merges` is empty, and the header counts row merges and partial rows.

    Attributes:
        units: UNIT records.
        unit_rows: int64 (units,) fused rows of each unit.
        packed_rows: int32, unit * ROW_CODE + row within the unit, for each row of each tile.
        row_merges: ROW_MERGE records, one for each fused row and head that has several results.
        contributions: int32, for each partial result of a unit, the partial row of its first row.
        choices: the decision about each shared prefix.
    """

    units: Records
    unit_rows: Ints
    packed_rows: npt.NDArray[np.int32]
    row_merges: Records
    contributions: npt.NDArray[np.int32]
    choices: tuple[Choice, ...]

    @property
    def role(self) -> Ints:
        """(items,) role of each item, which follows from its rows."""
        return role_of_rows(self.items["rows"].astype(np.int64), self.problem.roles)

    def sections(self) -> dict[str, npt.NDArray[np.int32]]:
        """Section name -> its int32 contents, in the order of the buffer."""
        sections = super().sections()
        indices = sections.pop("indices")  # the last one, so that an upload can end with it
        return sections | {
            "units": self.units.view(np.int32),
            "packed_rows": self.packed_rows,
            "row_merges": self.row_merges.view(np.int32),
            "contributions": self.contributions,
            "arrivals": np.zeros(MERGE_COUNTERS, np.int32),  # also after a launch that was aborted
            "indices": indices,
        }

    def check_fits(self, capacity: Capacity) -> None:
        """Raises CapacityExceeded, naming the section, unless the plan fits the capacity."""
        if not isinstance(capacity, ComposedCapacity):
            raise ArgumentError(name="capacity", reason="is not that of a composed plan")
        for name, got, bound in (
            ("units", len(self.units), capacity.max_units),
            ("packed rows", len(self.packed_rows), capacity.max_packed_rows),
            ("row_merges", len(self.row_merges), capacity.max_row_merges),
            ("contributions", len(self.contributions), capacity.max_contributions),
        ):
            if got > bound:
                raise CapacityExceeded(name=name, got=got, bound=bound)
        super().check_fits(capacity)


@dataclass(frozen=True)
class ComposedCapacity(Capacity):
    """Lengths of all sections of composed plans; `max_slots` counts partial rows.

    Attributes:
        max_units, max_row_merges: numbers of records.
        max_packed_rows, max_contributions: numbers of entries.
    """

    max_units: int
    max_packed_rows: int
    max_row_merges: int
    max_contributions: int
    votes_bytes: ClassVar[int] = 0  # no device planner makes composed plans

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Section name -> length in int32."""
        sizes = dict(super().sizes)
        indices = sizes.pop("indices")
        return sizes | {
            "units": self.max_units * len(UNIT.fields),
            "packed_rows": self.max_packed_rows,
            "row_merges": self.max_row_merges * len(ROW_MERGE.fields),
            "contributions": self.max_contributions,
            "arrivals": MERGE_COUNTERS,
            "indices": indices,
        }


def composed_capacity(
    bounds: Bounds,
    *,
    rows: int,
    num_kv_heads: int,
    group_size: int,
    num_ctas: int,
    num_roles: int = 1,
) -> ComposedCapacity:
    """Section lengths that no composed plan within the bounds exceeds.

    A unit is in one tile for each part that it reads, in at most `bounds.max_levels`. Levelling, or
    the Stream-K partition of two roles, cuts off at most `most_cuts` pieces, each with the rows of
    one tile. A prefix that is a part has two requests or more, and on one level no request has two
    prefixes. With one level, only pieces and the items they were cut off have partial rows.

    Args:
        bounds: the largest batch.
        rows: rows of a tile.
        num_kv_heads, group_size: key/value heads, and query heads of each.
        num_ctas: CTAs of the grid.
        num_roles: roles of the plans.

    Raises:
        ArgumentError: the bounds need more records than int32 can count, or two roles have more
            CTAs than one counter holds.
    """
    levels, requests = bounds.max_levels, bounds.max_requests
    queries, pieces = max(rows // group_size, 1), -(-group_size // rows)
    units = pieces * max_query_tiles(bounds.max_q_rows, requests, queries, 1)
    cuts = most_cuts(num_ctas, num_roles) if units and bounds.max_kv_len else 0
    smallest = group_size if pieces == 1 else (group_size % rows or rows)
    fused = bounds.max_q_rows * group_size
    whole = num_kv_heads * fused * levels  # partial rows of items that are not pieces
    check_ctas(num_ctas, num_roles)
    result = ComposedCapacity(
        bounds=bounds,
        num_ctas=num_ctas,
        max_items=num_kv_heads * units * levels + cuts,
        max_segments=requests + (levels - 1) * (requests // 2),
        max_merges=0,
        max_slots=(min(whole, cuts * rows) if levels == 1 else whole) + cuts * rows,
        max_indices=bounds.max_blocks,
        slot_rows=1,
        num_roles=num_roles,
        max_units=units,
        max_packed_rows=fused * levels,
        max_row_merges=num_kv_heads * fused,
        max_contributions=num_kv_heads * units * levels + cuts * (rows // smallest),
    )
    if max(result.total_ints, result.max_slots) > INT32_MAX:
        reason = f"need {result.total_ints} integers and {result.max_slots} partial rows, beyond "
        reason += "what int32 counts; declare smaller ones"
        raise ArgumentError(name="bounds", reason=reason)
    return result
