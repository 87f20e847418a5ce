"""`trace`: when each work item of the last run was computed, and where."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from warploom.errors import ArgumentError
from warploom.runtime.calls.pictures import picture_path
from warploom.runtime.calls.stamped_items import stamped_items
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.layout import Ints, Records
from warploom.scheduler.plan import Plan

if TYPE_CHECKING:
    from rich.table import Table

EVENTS = ".json"  # the ending of a trace for Perfetto


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
class Trace:
    """Work items of one run with their times; print it for a table, or `save` it.

    Attributes:
        items: records of `stamped_items.ITEM`, one for each work item, in the order of the plan.
        predicted: the end that the plan predicts.
        kernel: its name.
        device: where it ran.
        on_gpu: each CTA is on a line of its multiprocessor; else a line is a thread.
    """

    items: Records
    predicted: Prediction
    kernel: str
    device: str
    on_gpu: bool

    @property
    def place(self) -> str:
        """What a line is called."""
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
        worked = np.bincount(lane, weights=_took(self.items), minlength=len(lanes))
        return {
            int(sm): float(worked[lanes[:, 0] == sm].mean()) / (self.span_us or 1.0)
            for sm in np.unique(lanes[:, 0])
        }

    def roles(self) -> list[RoleTimes]:
        """Times of each role that has items, prefill first."""
        found = []
        for role in sorted(set(self.items["role"].tolist()), reverse=True):
            mine = self.items[self.items["role"] == role]
            took = _took(mine)
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

    def table(self) -> Table:
        """A line for each role; how busy lines were, and the predicted end, below."""
        from warploom.tables import new_table  # rich is slow to import

        columns = ("role", "items", f"{self.place}s", "busy us", "longest us", "last end us")
        table = new_table(*columns)
        table.title, table.title_justify = f"{self.kernel} on {self.device}", "left"
        table.caption, table.caption_justify = self.summary, "left"
        for column in table.columns[1:]:
            column.justify = "right"
        for one in self.roles():
            numbers = (f"{x:,.1f}" for x in (one.busy_us, one.longest_us, one.end_us))
            table.add_row(one.role, str(one.items), str(one.sms), *numbers)
        return table

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

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=100)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip("\n")

    def __repr__(self) -> str:
        return f"<Trace of {len(self.items)} items: {self.summary}>"

    def save(self, path: str | Path) -> Path:
        """Write a file, in folders that are made if need be.

        Args:
            path: with the ending .json for trace events, which https://ui.perfetto.dev opens, or
                with one of matplotlib for a picture (.png, .svg, .pdf, ...).

        Returns:
            The path.

        Raises:
            ArgumentError: another ending.
            MissingPackage: matplotlib is not installed, which pictures need.
        """
        target = _checked_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix.lower() == EVENTS:
            from warploom.runtime.calls.trace_events import write_events

            write_events(self, target)
        else:
            from warploom.runtime.calls.trace_picture import paint

            paint(self).savefig(target, dpi=130)
        return target


def trace(wrapper: AttentionWrapper, *paths: str | Path) -> Trace:
    """When each work item of a wrapper's last run was computed, and on which multiprocessor.

    Kernels tell it if `WARPLOOM_TRACE=1` is set when the wrapper is made; they are slower for that.
    Call it after `run`, or after the replay of a CUDA graph that holds the run; it waits for the
    device. Times are of the device's global timer, or of the host's steady clock. An item begins
    when a CTA has opened it and ends when its result is written and, if it was the last of a split
    tile, merged. What passes before attention take (`AttentionWrapper.program`) is in none of them,
    nor are launches and the merges of rows at the end of a composed plan.

    Args:
        wrapper: of a compiled back end.
        *paths: files to write at once, as by `Trace.save`.

    Returns:
        The items, with what the plan predicted.

    Raises:
        ArgumentError: no wrapper, one of the reference back end, or a path with an odd ending.
        MissingPackage: matplotlib is not installed, which pictures need.
        NotTraced: the wrapper was made without WARPLOOM_TRACE=1.
        NotPlanned, NotReplayed, NotRun: there is no plan, or it has not run.
        BatchRefused: the device refused to plan the batch.
        PlanMismatch: another wrapper has planned into this one's workspace since.
        ForbiddenUnderCapture: the current stream is being captured.
        InUse: another thread plans.
    """
    for path in paths:
        _checked_path(path)
    if not isinstance(wrapper, AttentionWrapper):
        reason = f"is {wrapper!r}; expected an AttentionWrapper that has planned and run"
        raise ArgumentError(name="wrapper", reason=reason)
    plan, stamps = wrapper.stamps()
    assert wrapper.planned is not None  # else there were no stamps
    source = wrapper.planned.kernel.source
    on_gpu = source.language == "cuda"
    items = stamped_items(plan, stamps)
    has_prices = wrapper.device.type == "cuda"  # elsewhere they are in proportion alone
    found = Trace(
        items, predicted(plan, items, on_gpu, has_prices), source.name, str(wrapper.device), on_gpu
    )
    for path in paths:
        found.save(path)
    return found


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
        return Prediction(1e6 * plan.predicted_seconds, "by the prices of two roles")
    busy = float(_took(items).sum())
    if on_gpu:
        us = busy / plan.active_ctas * plan.balance
        return Prediction(us, "by the plan's loads, at this run's mean rate")
    threads = max(1, len(np.unique(items["sm"])))
    return Prediction(busy / threads, "by an even share for each thread")


def _took(items: Records) -> npt.NDArray[np.float64]:
    """Microseconds of each item."""
    took: npt.NDArray[np.float64] = items["end_us"] - items["begin_us"]
    return took


def _checked_path(path: Any) -> Path:
    return picture_path(path, "a picture of trace()", (EVENTS,))
