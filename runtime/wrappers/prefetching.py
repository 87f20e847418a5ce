"""Prefetching by plan: pages of keys and values into L2, in the order in which a run reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from warploom import forks
from warploom.errors import ForbiddenUnderCapture
from warploom.prefetch_errors import BudgetTooSmall, CannotPrefetch
from warploom.runtime.devices.graph import is_capturing
from warploom.runtime.devices.graph_hold import KeptForGraphs
from warploom.runtime.formats.batch import Batch, OnDevice
from warploom.runtime.formats.paged import Pages
from warploom.runtime.formats.selected import SelectedBatch
from warploom.runtime.inputs.args import Geometry, check_key_values, checked_kv, key_value
from warploom.runtime.launching.prefetch import (
    SpanTable,
    checked_budget,
    cut,
    most_records,
    prefetcher,
)
from warploom.runtime.strategies.strategy import Planned
from warploom.runtime.tensors.dense import block_bytes
from warploom.runtime.tensors.unmapped import lacks_memory
from warploom.runtime.wrappers.plan_state import PlanState
from warploom.scheduler.model.bounds import Bounds
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


class PagePrefetcher:
    """Prefetches pages of one wrapper's plans; a `Follower` of them once it has.

    Attributes:
        tables: what was prefetched so far, by layout and pages: graphs may hold any, or are to.
    """

    def __init__(self, geometry: Geometry, bounds: Bounds | None, state: PlanState) -> None:
        """Begin without tables.

        Args:
            geometry: what caches must agree with.
            bounds: of all batches, if they were declared.
            state: which has the plan.
        """
        self._geometry, self._bounds, self._state = geometry, bounds, state
        self.tables: dict[tuple[_Layout, int], PageTable] = {}

    @property
    def is_used(self) -> bool:
        """Whether plans must write tables."""
        return bool(self.tables)

    def prefetch(self, kv: Any, max_bytes: int, sms: int) -> int:
        """Prefetch pages of the plan; `AttentionWrapper.prefetch` documents it."""
        held = self._state.guard
        if held.is_mine() or not held.try_enter(False):
            held.wait()
        try:
            return self._prefetch(kv, max_bytes, sms)
        finally:
            held.leave()

    def _prefetch(self, kv: Any, max_bytes: int, sms: int) -> int:
        planned = self._planned_pages()
        k, v = key_value(checked_kv(kv, self._geometry.kv_format, shared=True))
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
        prefetcher(self._geometry.device, sms).launch(pages.table, k.data_ptr(), v.data_ptr())
        return pages.bytes

    def _planned_pages(self) -> Planned:
        """The plan whose pages are known; raises as `prefetch` does."""
        batch, planned = self._state.required(), self._state.planned
        kv_format = self._geometry.kv_format
        if planned is None:
            raise CannotPrefetch(
                reason="the reference back end reads no memory", remedy="Leave backend= out."
            )
        if not isinstance(self._geometry.format, Pages):
            raise CannotPrefetch(
                reason=f"{kv_format} has no pages",
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
        return planned

    def _table_of(self, planned: Planned, layout: _Layout, most: int) -> PageTable:
        """The pages of a plan on the device."""
        device = self._geometry.device
        captured = is_capturing(device)
        pages = self.tables.get((layout, most))
        if pages is None or not pages.holds(planned):
            if captured:
                what = "prefetch() met a new cache or budget"
                raise ForbiddenUnderCapture(what=what, remedy=_REMEDY)
            bounds = self._bounds
            room = len(planned.plan.indices) if bounds is None else bounds.max_blocks
            pages = PageTable(device, layout, most, min(most, room))
            self.tables[layout, most] = pages
            self._state.may_replan = False
        if pages.planned is not planned:
            if captured:
                raise ForbiddenUnderCapture(what="prefetch() met a new plan", remedy=_REMEDY)
            pages.write(planned, self._order(planned))
        if captured:
            pages.keep_for_graph(device)
        return pages

    def _order(self, planned: Planned) -> Ints:
        return page_order(planned.plan, self._geometry.kv_format.block_kv).astype(np.int64)

    def follow(self, batch: Batch, planned: Planned) -> None:
        """Write the pages of a new plan, which captured prefetches must see, too."""
        if not self.tables or isinstance(planned.batch, OnDevice):
            return
        order = self._order(planned)
        for pages in self.tables.values():
            if pages.holds(planned):
                pages.write(planned, order)
