"""Does what the ledger decides: one lock around states and driver, and a thread that maps ahead."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from warploom import forks
from warploom.errors import ForbiddenUnderCapture
from warploom.memory_errors import MemoryClosed, OtherProcess, PageFailed
from warploom.runtime.tensors.unmapped import may_lack_memory
from warploom.serving.virtual_memory.driver import Addresses, Driver
from warploom.serving.virtual_memory.geometry import Geometry
from warploom.serving.virtual_memory.ledger import Ledger, Model, Span, State


@dataclass(eq=False)
class Tenant:
    """A model with its addresses.

    Attributes:
        model: in the ledger.
        addresses: of all its spans.
        geometry: where each span and plane lies in them.
        is_open: it shares the pool; else no page is at its addresses.
    """

    model: Model
    addresses: Addresses
    geometry: Geometry
    is_open: bool = True

    def address(self, span: Span, plane: int, row: int) -> int:
        """Where a page of a span belongs."""
        return self.addresses.first + self.geometry.offset(span.slot, plane, row)


@dataclass(frozen=True)
class ModelStats:
    """Pages of one model.

    Attributes:
        name: of the model.
        requests: that it holds.
        guaranteed, limit: pages that it can always have, and has at most.
        used: pages that it has, in any state.
        reusable: those of them that no request holds.
    """

    name: str
    requests: int
    guaranteed: int
    limit: int
    used: int
    reusable: int


@dataclass(frozen=True)
class PoolStats:
    """A pool at one moment; see `State` for what the states mean.

    Attributes:
        page_bytes: of a page.
        pages: of the pool; the next four add up to it.
        free, allocated, mapped, reusable: pages in each state.
        maps, unmaps: pages that the driver has mapped and unmapped since the pool was made; what
            it has mapped in part, and unmapped therefore, too.
        reuses: pages that requests took over from earlier ones without the driver.
        models: those that share the pool.
    """

    page_bytes: int
    pages: int
    free: int
    allocated: int
    mapped: int
    reusable: int
    maps: int
    unmaps: int
    reuses: int
    models: tuple[ModelStats, ...]


class Mapper:
    """All that models do with their pool. Any thread may, one after another.

    Between two calls, what the driver has mapped is what the ledger says, apart from what is still
    to be unmapped, since the driver has refused it: `unmaps` of the ledger, and `_due`.
    """

    def __init__(self, driver: Driver, ledger: Ledger, preallocate: bool) -> None:
        """Begin with all pages FREE, and make them if asked to.

        Raises:
            PageFailed: there is not so much memory; what was made is given back.
        """
        _close_left()
        self._driver, self._ledger = driver, ledger
        self._handles: dict[int, int] = {}  # by page
        self._tenants: dict[Model, Tenant] = {}
        self._abandoned: deque[Tenant] = deque()  # by caches that nobody holds any longer
        self._lock, self._owner = forks.lock(), os.getpid()
        self._thread: ThreadPoolExecutor | None = None
        self._closed = False
        self._maps = self._unmaps = 0
        self._due: deque[tuple[int, int, Any]] = deque()  # to unmap: address, pages, fence
        try:
            for page in range(ledger.num_pages if preallocate else 0):
                self._handle(page)
        except BaseException:
            self.close()
            raise

    def add(
        self, name: str, geometry: Geometry, slots: int, guaranteed: int, limit: int
    ) -> tuple[Tenant, torch.Tensor]:
        """Let a model share the pool, at addresses of its own, which are a uint8 tensor, too.

        Raises:
            ReservationFailed: there are not so many addresses.
            BudgetTooSmall, PoolExhausted: as `Ledger.add`.
        """
        with self._entered("a virtual cache cannot be made"):
            addresses = Addresses(self._driver, slots * geometry.slot_bytes)
            if geometry.margin < geometry.block - 1:
                may_lack_memory(addresses, addresses.first, addresses.size)
            memory = self._driver.tensor(addresses)
            model = self._ledger.add(name, geometry.planes, slots, guaranteed, limit)
            tenant = Tenant(model, addresses, geometry)
            self._tenants[model] = tenant
        return tenant, memory

    def remove(self, tenant: Tenant) -> None:
        """Take all pages back from a model, when the device is done with all that it was given."""
        with self._entered("a virtual cache cannot be closed"):
            self._remove(tenant)

    def abandon(self, tenant: Tenant) -> None:
        """`remove` at the next call of any model; it never waits, so finalizers may call it."""
        self._abandoned.append(tenant)

    def open(self, tenant: Tenant, rows: int) -> Span:
        """A span for a new request; raises as `Ledger.open`."""
        with self._entered("a request cannot be reserved"):
            span = self._ledger.open(tenant.model, rows)
            self._driver.follow(span.fence)
            return span

    def extend(self, spans: Iterable[tuple[Span, int]]) -> None:
        """Let requests hold so many rows each; raises as `Ledger.extend`, behind the first ones."""
        with self._entered("a request cannot grow beyond its memory"):
            for span, rows in spans:
                self._extend(span, rows)

    def map(self, tenant: Tenant, span: Span, rows: int = 0) -> None:
        """Let a request hold so many rows, and give addresses to all that it holds.

        Raises:
            LimitReached, PoolExhausted: as `Ledger.extend`.
            PageFailed: the driver refuses; the request holds the rows, without addresses.
        """
        with self._entered("a request cannot grow beyond its memory"):
            self._extend(span, rows)
            self._map(tenant, span)

    def map_later(self, tenant: Tenant, spans: Sequence[Span], keep: object) -> Future[None]:
        """Give addresses to all that requests hold, in a thread of the pool's own.

        Args:
            tenant: whose requests.
            spans: theirs.
            keep: what must live until then, such as the pool: whose end waits for the lock.
        """
        with self._entered("a request cannot grow beyond its memory"):
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "warploom-map", self._driver.enter_thread)
            return self._thread.submit(self._map_all, tenant, spans, keep)

    def release(self, span: Span) -> None:
        """End a request; its pages may be unmapped when the current stream has come to here.

        And when the kernels of earlier requests there are done, of which this stream need not know:
        a request that is cancelled at once has launched nothing behind them.
        """
        with self._entered("a request cannot be released"):
            self._driver.follow(span.fence)
            self._ledger.release(span, self._driver.fence())

    def trim(self, model: Model, pages: int | None = None) -> int:
        """Unmap and free REUSABLE pages; returns how many."""
        with self._entered("pages cannot be unmapped"):
            freed = self._ledger.trim(model, pages)
            self._flush()
            return freed

    def refuse_other_process(self) -> None:
        """Raise OtherProcess in a process that was forked from the pool's."""
        if os.getpid() != self._owner:
            raise OtherProcess(owner=self._owner)

    def models(self) -> list[Model]:
        """Those that share the pool."""
        return list(self._ledger.models)

    def stats(self) -> PoolStats:
        with self._lock:
            counts = self._ledger.counts()
            models = tuple(
                ModelStats(
                    model.name,
                    sum(span.is_live for span in model.spans),
                    model.guaranteed,
                    model.limit,
                    model.used,
                    model.surplus,
                )
                for model in self._ledger.models
            )
            return PoolStats(
                self._driver.page_bytes,
                self._ledger.num_pages,
                counts[State.FREE],
                counts[State.ALLOCATED],
                counts[State.MAPPED],
                counts[State.REUSABLE],
                self._maps,
                self._unmaps,
                self._ledger.reused,
                models,
            )

    def close(self) -> None:
        """Give everything back; models that are left lose their pages. Again does nothing.

        Raises:
            PageFailed: the driver refuses; the pool stays open, and closing can be tried again.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._driver.refuse_under_capture("a memory pool cannot be closed")
        thread, self._thread = self._thread, None  # a pool that stays open makes another
        if thread is not None:  # it may be the one that calls
            thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for tenant in list(self._tenants.values()):
                self._remove(tenant)
            for page in list(self._handles):
                self._driver.destroy(self._handles[page])
                del self._handles[page]
            self._driver.close()
            self._closed = True

    def close_or_leave(self) -> None:
        """`close` for finalizers: what is refused is left to the next call of any pool."""
        try:
            self.close()
        except (ForbiddenUnderCapture, PageFailed):
            _left.append(self)

    @contextmanager
    def _entered(self, what: str) -> Iterator[None]:
        """One call: it has the lock, and models that nobody holds any longer are gone."""
        self.refuse_other_process()
        self._driver.refuse_under_capture(what)
        _close_left()
        with self._lock:
            if self._closed:
                raise MemoryClosed(what="the memory pool")
            while self._abandoned:
                with suppress(PageFailed):  # no matter of this call: whoever maps next tries again
                    self._remove(self._abandoned.popleft())
            yield

    def _remove(self, tenant: Tenant) -> None:
        if tenant.is_open:
            self._driver.drain()
            tenant.is_open = False
            self._ledger.remove(tenant.model)
        self._flush()

    def _extend(self, span: Span, rows: int) -> None:
        """`Ledger.extend`; the current stream waits for whoever has left rows that are taken."""
        if span.surplus and rows > span.held:
            self._driver.follow(span.fence)
        self._ledger.extend(span, rows)

    def _map_all(self, tenant: Tenant, spans: Sequence[Span], keep: object) -> None:
        for span in spans:
            with self._lock:  # for each anew: others need not wait for all
                if tenant.is_open:
                    self._map(tenant, span)

    def _map(self, tenant: Tenant, span: Span) -> None:
        """Give addresses to rows that have none, in all planes or in none."""
        first, rows, planes = span.mapped, span.held - span.mapped, tenant.model.planes
        if rows <= 0:
            return
        self._flush()
        tried: list[int] = []
        try:
            for plane in range(planes):
                pages = span.pages[first * planes + plane : span.held * planes : planes]
                handles = [self._handle(page) for page in pages]
                tried.append(tenant.address(span, plane, first))
                self._driver.map(tried[-1], handles)
        except BaseException:
            self._due.extend((address, rows, None) for address in tried)
            with suppress(PageFailed):  # the first refusal is told
                self._flush()
            raise
        finally:
            self._maps += rows * len(tried)
        self._ledger.map_held(span)

    def _flush(self) -> None:
        """Unmap what the ledger has taken from spans. What fails is tried again the next time."""
        while self._ledger.unmaps:
            unmap = self._ledger.unmaps.popleft()
            tenant = self._tenants[unmap.span.model]
            for plane in range(tenant.model.planes):
                address = tenant.address(unmap.span, plane, unmap.first)
                fence = None if plane else unmap.fence  # behind the first, it has passed
                self._due.append((address, unmap.rows, fence))
        while self._due:
            address, pages, fence = self._due[0]
            self._driver.wait(fence)
            self._driver.unmap(address, pages)
            self._unmaps += pages
            self._due.popleft()
        # not before: a model that is gone has its addresses until no page is there
        for tenant in [one for one in self._tenants.values() if not one.is_open]:
            del self._tenants[tenant.model]

    def _handle(self, page: int) -> int:
        if page not in self._handles:
            self._handles[page] = self._driver.create(page)
        return self._handles[page]


_left: deque[Mapper] = deque()  # of pools that nobody holds any longer


def _close_left() -> None:
    for _ in range(len(_left)):
        try:
            mapper = _left.popleft()
        except IndexError:  # another thread has closed the rest
            return
        mapper.close_or_leave()
