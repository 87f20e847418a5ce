"""A plan in a few numbers, for `explain()`."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.scheduler.capacity import Capacity
from warploom.scheduler.plan import Plan


@dataclass(frozen=True)
class PlanSummary:
    """What a plan does with one batch.

    Attributes:
        segments, items: records in use.
        busy_ctas: CTAs with work; `active_ctas` may have some, the grid has `num_ctas`.
        mean_load, max_load: modelled cost over the active CTAs.
        split_tiles: query tiles whose keys several CTAs share.
        slots: partial results in use; `max_slots` fit (None without a capacity).
        split_size: keys at whose multiples tiles are cut; None: cut to balance the load.
    """

    segments: int
    items: int
    busy_ctas: int
    active_ctas: int
    num_ctas: int
    mean_load: float
    max_load: int
    split_tiles: int
    slots: int
    max_slots: int | None
    split_size: int | None

    @property
    def balance(self) -> float:
        """Largest load over mean load: 1 is perfect, and 1 if there is no work."""
        return self.max_load / self.mean_load if self.mean_load else 1.0

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) pairs, ready to print."""
        room = "" if self.max_slots is None else f" of {self.max_slots}"
        cut = "to balance" if self.split_size is None else f"every {self.split_size} keys"
        return [
            ("work items", str(self.items)),
            ("CTAs with work", f"{self.busy_ctas} of {self.active_ctas} (grid {self.num_ctas})"),
            ("largest / mean load", f"{self.balance:.3f}"),
            ("split tiles", f"{self.split_tiles}, cut {cut}"),
            ("partial slots", f"{self.slots}{room}"),
        ]


def summarize(plan: Plan, capacity: Capacity | None = None) -> PlanSummary:
    """Counts a plan.

    Args:
        plan: the plan.
        capacity: what it was made to fit, if anything.
    """
    return PlanSummary(
        segments=len(plan.segments),
        items=len(plan.items),
        busy_ctas=int((plan.cta_indptr[1:] > plan.cta_indptr[:-1]).sum()),
        active_ctas=plan.active_ctas,
        num_ctas=plan.num_ctas,
        mean_load=float(plan.loads.sum()) / plan.active_ctas,
        max_load=int(plan.loads.max(initial=0)),
        split_tiles=len(plan.merges),
        slots=plan.num_slots,
        max_slots=None if capacity is None else capacity.max_slots,
        split_size=plan.split_size,
    )
