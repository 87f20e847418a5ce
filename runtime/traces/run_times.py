"""The model of a trace: items of a run on lines, what each role took, and the predicted end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from warploom.scheduler.model.layout import Ints, Records
from warploom.scheduler.plans.plan import Plan


@dataclass(frozen=True)
class Prediction:
    """When the plan says that the last item ends.

    Attributes:
        us: microseconds since the first item began.
        by: where that is from.
    """

    us: float
    by: str


@dataclass(frozen=True)
class RoleTimes:
    """What the items of one role took.

    Attributes:
        role: prefill, decode or single.
        items: how many.
        sms: multiprocessors that had some, or threads.
        busy_us: microseconds that all items took together.
        longest_us: that the longest took.
        end_us: when the last one ended.
    """

    role: str
    items: int
    sms: int
    busy_us: float
    longest_us: float
    end_us: float


@dataclass(frozen=True, eq=False)
class RunTimes:
    """Work items of one run with their times.

    Attributes:
        items: records of `stamped_items.ITEM`, one for each work item, in the order of the plan.
        predicted: the end that the plan predicts.
        kernel: its name.
        device: where it ran.
        on_gpu: lines are CTAs of multiprocessors; else they are threads.
    """

    items: Records
    predicted: Prediction
    kernel: str
    device: str
    on_gpu: bool

    @property
    def place(self) -> str:
        """What has a number in the field `sm`."""
        return "SM" if self.on_gpu else "thread"

    @property
    def span_us(self) -> float:
        """Microseconds from the begin of the first item to the end of the last."""
        return float(self.items["end_us"].max(initial=0.0))

    @cached_property
    def lanes(self) -> tuple[Ints, Ints]:
        """Lines on which no two items overlap.

        Returns:
            (lanes, 2) multiprocessor and CTA of each, in order, or thread twice; and (items,) the
            lane of each item.
        """
        second = self.items["cta" if self.on_gpu else "sm"]
        both = np.stack((self.items["sm"], second), axis=1)
        lanes, lane = np.unique(both, axis=0, return_inverse=True)
        return lanes, lane.reshape(-1)

    def busy(self) -> dict[int, float]:
        """Of each multiprocessor or thread, by number: the share of the span that items take.

        Where CTAs share a multiprocessor it is their mean.
        """
        lanes, lane = self.lanes
        worked = np.bincount(lane, weights=took_us(self.items), minlength=len(lanes))
        return {
            int(sm): float(worked[lanes[:, 0] == sm].mean()) / (self.span_us or 1.0)
            for sm in np.unique(lanes[:, 0])
        }

    def roles(self) -> list[RoleTimes]:
        """Times of each role that has items, prefill first."""
        found = []
        for role in sorted(set(self.items["role"].tolist()), reverse=True):
            mine = self.items[self.items["role"] == role]
            took = took_us(mine)
            found.append(
                RoleTimes(
                    role=role,
                    items=len(mine),
                    sms=len(np.unique(mine["sm"])),
                    busy_us=float(took.sum()),
                    longest_us=float(took.max()),
                    end_us=float(mine["end_us"].max()),
                )
            )
        return found

    @property
    def summary(self) -> str:
        """Span, busy share and predicted end in a sentence."""
        if not len(self.items):
            return "no work items"
        busy = list(self.busy().values())
        places = f"1 {self.place}" if len(busy) == 1 else f"{len(busy)} {self.place}s"
        return (
            f"{self.span_us:,.1f} us; {places} busy for {np.mean(busy):.0%} of it, the least for "
            f"{min(busy):.0%}; predicted end {self.predicted.us:,.1f} us ({self.predicted.by})"
        )


def took_us(items: Records) -> npt.NDArray[np.float64]:
    """Microseconds of each item."""
    took: npt.NDArray[np.float64] = items["end_us"] - items["begin_us"]
    return took


def predicted(plan: Plan, items: Records, on_gpu: bool, has_prices: bool) -> Prediction:
    """When a plan's items should end.

    Two roles have prices in seconds on a GPU. Elsewhere costs have no unit, so a unit of them takes
    what it took on average in this very run: how long the CTA with the largest load then takes is
    what the plan says of its balance. Threads of the host take items of any list, so that an even
    share for each is as good as they can be.

    Args:
        plan: with the loads of its lists.
        items: ITEM records.
        on_gpu: its lists belong to CTAs.
        has_prices: the prices of two roles are picoseconds.
    """
    if has_prices and plan.predicted_seconds is not None:
        return Prediction(1e6 * plan.predicted_seconds, "by the prices of two roles on an H200")
    busy = float(took_us(items).sum())
    if on_gpu:
        us = busy / plan.problem.active_ctas * plan.balance
        return Prediction(us, "by the plan's loads, at this run's mean rate")
    threads = max(1, len(np.unique(items["sm"])))
    return Prediction(busy / threads, "by an even share for each thread")
