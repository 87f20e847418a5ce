"""`trace`: when each work item of the last run was computed, and where."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from warploom.errors import ArgumentError
from warploom.runtime.calls.pictures import picture_path
from warploom.runtime.traces.events import write_events
from warploom.runtime.traces.picture import paint
from warploom.runtime.traces.run_times import RunTimes, predicted
from warploom.runtime.traces.stamped_items import stamped_items
from warploom.runtime.wrappers.wrapper import AttentionWrapper

if TYPE_CHECKING:
    from rich.table import Table

EVENTS = ".json"  # the ending of a trace for Perfetto


class Facade(Protocol):
    """What has a wrapper behind it, that of its last run."""

    @property
    def wrapper(self) -> AttentionWrapper | None: ...


class Trace(RunTimes):
    """Work items of one run with their times; print it for a table, or `save` it."""

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
            write_events(self, target)
        else:
            paint(self).savefig(target, dpi=130)
        return target


def trace(wrapper: AttentionWrapper | Facade, *paths: str | Path) -> Trace:
    """When each work item of a wrapper's last run was computed, and on which multiprocessor.

    Kernels tell it if `WARPLOOM_TRACE=1` is set when the wrapper is made; they are slower for that.
    Call it after `run`, or after the replay of a CUDA graph that holds the run; it waits for the
    device. Times are of the device's global timer, or of the host's steady clock. An item begins
    when a CTA has opened it and ends when its result is written and, if it was the last of a split
    tile, merged. What passes before attention take (`AttentionWrapper.program`) is in none of them,
    nor are launches and the merges of rows at the end of a composed plan.

    Args:
        wrapper: of a compiled back end; or one of `warploom.engines.flashinfer`, whose `.wrapper`
            is taken.
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
    made = getattr(wrapper, "wrapper", wrapper)
    if not isinstance(made, AttentionWrapper):
        reason = f"is {wrapper!r}; expected an AttentionWrapper that has planned and run"
        what = "" if made is wrapper else f"; its .wrapper is {made!r}, as before a run"
        raise ArgumentError(name="wrapper", reason=reason + what)
    wrapper = made
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


def _checked_path(path: Any) -> Path:
    return picture_path(path, "a picture of trace()", (EVENTS,))
