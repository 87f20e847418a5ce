"""`prefetch` of `AttentionWrapper`: pages of keys into L2, in the order of the plan."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch

from warploom import forks
from warploom.dsl.values.stand_ins import unseen
from warploom.errors import ForbiddenUnderCapture
from warploom.prefetch_errors import BudgetTooSmall, CannotPrefetch
from warploom.runtime.devices.graph import is_capturing
from warploom.runtime.devices.graph_hold import KeptForGraphs
from warploom.runtime.formats import format_of
from warploom.runtime.formats.batch import Batch, OnDevice
from warploom.runtime.formats.paged import Pages
from warploom.runtime.formats.selected import SelectedBatch
from warploom.runtime.inputs.args import check_key_values, checked_kv, key_value
from warploom.runtime.launching.prefetch import (
    SMS,
    SpanTable,
    checked_budget,
    cut,
    most_records,
    prefetcher,
)
from warploom.runtime.strategies.strategy import Planned
from warploom.runtime.tensors.dense import block_bytes
from warploom.runtime.tensors.unmapped import lacks_memory
from warploom.runtime.wrappers.running import Running
from warploom.scheduler.model.layout import Ints
from warploom.scheduler.plans.page_order import page_order

_REMEDY = "Call it once before the capture, with this cache and this budget."
_Layout = tuple[int, int, int, int]
_of_graphs = KeptForGraphs[SpanTable]()  # replays may outlast the wrapper
_lock = forks.lock()


class PageTable:
    """The pages of a plan as the kernel's table, for caches of one layout.

    Attributes:
        layout: bytes from page to page and bytes of a page, of keys and of values.
        most: pages that are prefetched.
        planned: whose pages the table holds; None before.
    """

    def __init__(self, device: torch.device, layout: _Layout, most: int, room: int) -> None:
        """Begin without pages.

        Args:
            device: of the cache.
            layout, most: the attributes.
            room: pages that the table can hold.
        """
        self.layout, self.most = layout, most
        self.planned: Planned | None = None
        _, keys, _, values = layout
        self.table = SpanTable(device, most_records(room, keys) + most_records(room, values))
        self._room = room
        self.bytes = 0  # of what is prefetched

    def holds(self, planned: Planned) -> bool:
        """Whether there is room for the pages of a plan."""
        return min(self.most, len(planned.plan.indices)) <= self._room

    def keep_for_graph(self, device: torch.device) -> None:
        """Keep the table for as long as the CUDA graph exists that is being captured."""
        with _lock:
            _of_graphs.drop_released()
            _of_graphs.keep(self.table, device)

    def write(self, planned: Planned, order: Ints) -> None:
        """Enqueue the first pages of a plan's order: each one's keys, then its values."""
        key_step, keys, value_step, values = self.layout
        pages = order[: self.most]
        offsets = np.stack([pages * key_step, pages * value_step], axis=1).reshape(-1)
        sizes = np.tile(np.array([keys, values], np.int64), len(pages))
        sources = np.tile(np.arange(2), len(pages))
        self.bytes = len(pages) * (keys + values)
        self.table.write(cut(offsets, sizes, sources, self.bytes))
        self.planned = planned


class Prefetching(Running):
    """The part of a wrapper that prefetches."""

    @cached_property
    def _pages(self) -> dict[tuple[_Layout, int], PageTable]:
        """What was prefetched so far, by layout and pages: graphs may hold any, or are to."""
        return {}

    @unseen
    def prefetch(self, kv: Any, max_bytes: int, *, sms: int = SMS) -> int:
        """Bring pages that the next run will read into L2, on the caller's current stream.

        Only a plan knows which those are, and in which order: the first work items of all CTAs come
        first. Enqueue it beside what the run waits for, such as a collective; it changes no result.
        The pages are worked out at the first call after a plan, so layers share them. A wrapper
        that has prefetched works them out in each `plan`, into the same memory, so that a captured
        prefetch follows the plan as a captured run does: under the same bounds, with
        `cuda_graph=True`. It keeps a table for each layout of caches and each budget.

        Args:
            kv: the cache, as `run` takes it. A page must be one block of memory.
            max_bytes: of keys and values together; whole pages only.
            sms: CTAs that ask, each on an SM.

        Returns:
            Bytes that are asked for: less than the budget, if the plan reads less.

        Raises:
            NotPlanned: there is no plan, or the last one was refused.
            BadBudget, BudgetTooSmall: it is no number of bytes, or below a page.
            CannotPrefetch: the host does not know the pages, there are none, or they have memory in
                parts alone, as those of a `VirtualCache` that are longer than 128 tokens.
            HasGaps: a page is no block of memory.
            WrongDevice, WrongShape, IndexOutOfRange: not the cache of this wrapper.
            ForbiddenUnderCapture: what has to be worked out first, while a graph is captured.
            InUse: another thread plans.
        """
        held = self._guard
        if held.is_mine() or not held.try_enter(False):
            held.wait()
        try:
            return self._prefetch(kv, max_bytes, sms)
        finally:
            held.leave()

    def _prefetch(self, kv: Any, max_bytes: int, sms: int) -> int:
        planned = self._planned_pages()
        k, v = key_value(checked_kv(kv, self.kv_format, shared=True))
        check_key_values(k, v, self._geometry, planned.batch)
        if lacks_memory(k) or lacks_memory(v):
            raise CannotPrefetch(
                reason="pages of this VirtualCache have addresses without memory",
                remedy="Make it with a page_size of at most 128 tokens.",
            )
        layout = (*block_bytes(k, "k"), *block_bytes(v, "v"))
        budget, needed = checked_budget(max_bytes), layout[1] + layout[3]
        if budget < needed:
            raise BudgetTooSmall(got=budget, what="a page of keys and values", needed=needed)
        pages = self._table_of(planned, layout, budget // needed)
        prefetcher(self.device, sms).launch(pages.table, k.data_ptr(), v.data_ptr())
        return pages.bytes

    def _planned_pages(self) -> Planned:
        """The plan whose pages are known; raises as `prefetch` does."""
        batch = self._batch
        if batch is None:
            raise self._not_planned()
        if self.planned is None:
            raise CannotPrefetch(
                reason="the reference back end reads no memory", remedy="Leave backend= out."
            )
        if not isinstance(format_of(self.kv_format), Pages):
            raise CannotPrefetch(
                reason=f"{self.kv_format} has no pages",
                remedy="Give k and v to warploom.prefetch.prefetch.",
            )
        if isinstance(batch, SelectedBatch):
            raise CannotPrefetch(
                reason="a selection on the device says which pages are read",
                remedy="Prefetch weights meanwhile (warploom.prefetch.prefetch).",
            )
        if isinstance(batch, OnDevice):
            raise CannotPrefetch(
                reason="the device planned, and the host knows no pages",
                remedy="Give plan() its index arrays on the host.",
            )
        return self.planned

    def _table_of(self, planned: Planned, layout: _Layout, most: int) -> PageTable:
        """The pages of a plan on the device."""
        captured = is_capturing(self.device)
        pages = self._pages.get((layout, most))
        if pages is None or not pages.holds(planned):
            if captured:
                what = "prefetch() met a new cache or budget"
                raise ForbiddenUnderCapture(what=what, remedy=_REMEDY)
            bounds = self._bounds
            room = len(planned.plan.indices) if bounds is None else bounds.max_blocks
            pages = PageTable(self.device, layout, most, min(most, room))
            self._pages[layout, most] = pages
            self._asks_planner_alone = False
        if pages.planned is not planned:
            if captured:
                raise ForbiddenUnderCapture(what="prefetch() met a new plan", remedy=_REMEDY)
            pages.write(planned, self._order(planned))
        if captured:
            pages.keep_for_graph(self.device)
        return pages

    def _order(self, planned: Planned) -> Ints:
        return page_order(planned.plan, self.kv_format.block_kv).astype(np.int64)

    def _nobody_looks(self) -> bool:
        return not self._pages and super()._nobody_looks()

    def _take(self, batch: Batch, inputs: dict[str, Any]) -> None:
        """Plan; captured prefetches must see the pages of the new plan, too."""
        super()._take(batch, inputs)
        planned = self.planned
        if not self._pages or planned is None or isinstance(planned.batch, OnDevice):
            return
        order = self._order(planned)
        for pages in self._pages.values():
            if pages.holds(planned):
                pages.write(planned, order)
