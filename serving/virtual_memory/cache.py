"""A KV cache whose requests have contiguous addresses, and memory only where they have tokens."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from warploom.dsl.types.dtypes import DType, kv_dtype
from warploom.dsl.types.formats import Layout, Paged
from warploom.errors import ArgumentError, UnsupportedSpec
from warploom.memory_errors import (
    AlreadyReserved,
    BudgetTooSmall,
    MemoryClosed,
    NotReserved,
    RequestTooLong,
)
from warploom.runtime.declaring.declare import checked_count, checked_number
from warploom.serving.virtual_memory.geometry import LONGEST, Geometry
from warploom.serving.virtual_memory.ledger import Span
from warploom.serving.virtual_memory.mapper import Tenant
from warploom.serving.virtual_memory.pool import MemoryPool
from warploom.serving.virtual_memory.views import Views, page_tables

_MOST_PAGES = 2**31 - 1
_NOTHING_DUE: Future[None] = Future()  # of all steps that need no page, which are nearly all
_NOTHING_DUE.set_result(None)


@dataclass(eq=False)
class _Request:
    """A request, its tokens, and how many it can have without the pool."""

    span: Span
    tokens: int = 0
    ready: int = 0


class VirtualCache:
    """Keys and values of all layers of one model, in memory that it shares with other models.

    Each request has a slot: addresses for `max_tokens` tokens, reserved once, that never move.
    Memory is mapped there as the request grows, so kernels and CUDA graphs see one tensor that
    stays where it is, and a page table with one entry for each request. A request that ends leaves
    its memory where it is, and the next one that it fits takes it over without a call of the
    driver.

    Addresses behind a request's tokens have no memory: touching them ends the process on a CPU, and
    the CUDA context on a GPU. So do not print or clone the tensors of `kv` whole; those of `view`
    have memory everywhere. New memory is not cleared.

    Calls about one request must come from one thread at a time; different requests may grow in
    different threads. `reserve`, `grow` and `release` order memory by the current stream: release
    on a stream that is behind all kernels which read or write the request. A forked process shares
    the memory of the CPU's pages: calls that hand out, grow or release memory raise OtherProcess
    there, and tensors that were taken before the fork must not be written.

    Attributes:
        kv_format: what kernels are declared with to read it.
        slots: requests that it holds at the same time.
        max_tokens: of a request.
    """

    def __init__(
        self,
        pool: MemoryPool,
        *,
        num_layers: int = 1,
        max_requests: int,
        max_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str | DType | torch.dtype = "float16",
        layout: Layout = "NHD",
        order: Iterable[str] = ("layer", "kv", "token", "head"),
        page_size: int | None = None,
        guaranteed_bytes: int = 0,
        limit_bytes: int | None = None,
        name: str | None = None,
    ) -> None:
        """Reserve addresses; memory comes with the requests.

        Args:
            pool: whose pages are mapped.
            num_layers: layers of the model.
            max_requests: requests at the same time.
            max_tokens: of one request, 2^28 or a little less. Neither costs memory: be generous.
            num_kv_heads, head_dim: of keys and of values.
            dtype: float16, bfloat16, float32, float8_e4m3fn, float8_e5m2 or int8.
            layout: of the tensors that kernels get: NHD or HND, whatever lies in memory how.
            order: how the numbers lie in memory, from the outermost axis on; the head dimension
                comes last. Each combination of what stands before "token" grows in pages of its
                own: by default 2 * num_layers pages at a time, each layer's keys dense in memory.
                With ("token", "layer", "kv", "head") a request grows by single pages, and a layer's
                keys lie one token's bytes of all layers apart.
            page_size: tokens in a page of the page tables that kernels get; by default each request
                is one page. Kernels may load whole tiles of a page, so without it memory is mapped
                for 127 tokens more than there are, and with it for `page_size` - 1 at most.
            guaranteed_bytes: memory that other models leave to this one, rounded up to pages.
            limit_bytes: memory that it has at most, rounded down; the whole pool by default.
            name: for messages and tables.

        Raises:
            ArgumentError: arguments of a wrong type or value.
            UnsupportedSpec: a type that no cache has.
            BudgetTooSmall: the pool or the limit is less than a request's first token needs, or
                than is guaranteed.
            PoolExhausted: other models hold what shall be guaranteed.
            ReservationFailed: there are not so many addresses.
            MemoryClosed: the pool is closed.
        """
        if not isinstance(pool, MemoryPool):
            raise ArgumentError(name="pool", reason=f"is {pool!r}; expected a MemoryPool")
        counts = {"num_layers": num_layers, "max_requests": max_requests, "max_tokens": max_tokens}
        counts |= {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for what, count in counts.items():
            checked_count(what, count, LONGEST if what == "max_tokens" else None)
        stored = _storage(dtype)
        sizes = {"layer": num_layers, "kv": 2, "head": num_kv_heads}
        order = order if isinstance(order, str) else tuple(order)
        if page_size is not None:
            checked_count("page_size", page_size)
        geometry = Geometry(
            sizes, head_dim, stored.itemsize, order, max_tokens, pool.page_bytes, page_size
        )
        if max_requests * geometry.blocks_per_slot > _MOST_PAGES:
            pages = max_requests * geometry.blocks_per_slot
            reason = f"is {page_size}; page tables would number {pages} pages, and have 32 bits"
            raise ArgumentError(name="page_size", reason=reason)
        self.kv_format = Paged(geometry.block, layout=layout)
        self.slots, self.max_tokens = max_requests, max_tokens
        self._pool, self._mapper, self._geometry = pool, pool._mapper, geometry
        name = name or f"model {len(self._mapper.models()) + 1}"
        guaranteed, limit = self._budget(guaranteed_bytes, limit_bytes)
        self._tenant, memory = self._mapper.add(name, geometry, max_requests, guaranteed, limit)
        self._forget = weakref.finalize(self, self._mapper.abandon, self._tenant)
        self._forget.atexit = False
        self._views: Views | None = Views(memory.view(stored), geometry, max_requests, layout)
        self._requests: dict[Hashable, _Request] = {}

    def _budget(self, guaranteed_bytes: int, limit_bytes: int | None) -> tuple[int, int]:
        """Pages that are guaranteed, and pages that are the limit."""
        size, pages = self._pool.page_bytes, self._pool.num_pages
        guaranteed = -(-checked_number("guaranteed_bytes", guaranteed_bytes) // size)
        name, given = "the pool", pages * size
        if limit_bytes is not None:
            checked_count("limit_bytes", limit_bytes)
            if limit_bytes < given:
                name, given = "limit_bytes", limit_bytes
        first = self._geometry.rows(1) * self._geometry.planes
        if given // size < first:
            what = f"{first} pages, which the first token of a request needs"
            raise BudgetTooSmall(name=name, got=given, needed=first * size, what=what)
        return guaranteed, given // size

    @property
    def requests(self) -> list[Hashable]:
        """Those that are held, in the order in which they were reserved."""
        return list(self._requests)

    def length(self, request: Hashable) -> int:
        """Tokens of a request, as `grow` has set them; raises NotReserved."""
        return self._held(request).tokens

    def reserve(self, request: Hashable, tokens: int = 0) -> int:
        """Take a request in, with the pages for so many tokens: ALLOCATED, and no one else's.

        Of the slots without a request, the one whose memory fits best is taken; what is mapped
        there already need not be mapped again. The rest is mapped by `grow`, or ahead of it by
        `map_ahead`.

        Args:
            request: its name, anything hashable.
            tokens: that it will have at first.

        Returns:
            Its slot: the index of its page in `kv` if `page_size` was not given.

        Raises:
            AlreadyReserved: there is one of this name.
            RequestTooLong: more than `max_tokens`.
            OutOfSlots: `max_requests` are held.
            LimitReached, PoolExhausted: there are too few pages.
            ForbiddenUnderCapture: a CUDA graph is being captured.
            MemoryClosed, OtherProcess: the cache is closed, or belongs to another process.
        """
        tenant = self._checked_tenant()
        if request in self._requests:
            raise AlreadyReserved(model=tenant.model.name, request=request)
        rows = self._geometry.rows(self._length("tokens", request, tokens))
        span = self._mapper.open(tenant, rows)
        self._requests[request] = _Request(span)
        return span.slot

    def grow(self, request: Hashable, tokens: int) -> None:
        """Let a request have so many tokens in all, with memory for each when this returns.

        Where there is memory already, as in nearly all steps of a generation, this is a comparison.
        Fewer tokens than before, as when a draft was refused, keep the memory.

        Raises:
            NotReserved: there is no such request.
            RequestTooLong, LimitReached, PoolExhausted: as `reserve`; nothing has changed.
            PageFailed: the driver refuses; the request has its pages, and growing can be tried
                again.
            ForbiddenUnderCapture: memory must be mapped, and a CUDA graph is being captured.
            MemoryClosed, OtherProcess: as `reserve`.
        """
        held = self._held(request)
        if type(tokens) is not int or not 0 <= tokens <= held.ready:
            tokens = self._length("tokens", request, tokens)
            if tokens > self._ready(held):
                self._mapper.map(self._tenant, held.span, self._geometry.rows(tokens))
                self._ready(held)
        held.tokens = tokens

    def map_ahead(self, requests: Iterable[Hashable], tokens: int = 1) -> Future[None]:
        """Have memory mapped for the tokens to come, while the device is at work on earlier ones.

        Pages are taken now, so that too few of them are an error of this call; a thread of the pool
        maps them. `grow` need not be told: it waits for what is being mapped, and maps the rest.

        Args:
            requests: those that will grow.
            tokens: how many more each will have; no more than `max_tokens` in all.

        Returns:
            What tells when all is mapped; where there is nothing to map, one future for all such
            calls. Nobody needs to ask.

        Raises:
            NotReserved: there is no such request.
            LimitReached, PoolExhausted: too few pages; earlier requests of the list have theirs.
            ForbiddenUnderCapture, MemoryClosed, OtherProcess: as `grow`.
        """
        more, due = checked_number("tokens", tokens), []
        for request in requests:
            held = self._held(request)
            wanted = min(held.tokens + more, self.max_tokens)
            if wanted > held.ready and wanted > self._ready(held):
                due.append((held.span, self._geometry.rows(wanted)))
        if not due:
            return _NOTHING_DUE
        self._mapper.extend(due)
        return self._mapper.map_later(self._tenant, [span for span, _ in due], self._pool)

    def release(self, request: Hashable) -> None:
        """End a request. Its memory stays mapped, REUSABLE by whoever needs it next.

        Raises:
            NotReserved: there is no such request, or no longer.
            ForbiddenUnderCapture, MemoryClosed, OtherProcess: as `reserve`.
        """
        self._mapper.release(self._held(request).span)
        del self._requests[request]

    def trim(self, num_bytes: int | None = None) -> int:
        """Unmap memory that no request holds, so that it need not be unmapped by who needs it.

        It waits for kernels that may still read it.

        Args:
            num_bytes: at least so much, if there is; all by default.

        Returns:
            Bytes that went back to the pool.
        """
        size = self._pool.page_bytes
        pages = None if num_bytes is None else -(-checked_number("num_bytes", num_bytes) // size)
        return self._mapper.trim(self._checked_tenant().model, pages) * size

    def kv(self, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as kernels take them, at addresses that stay.

        Returns:
            Two tensors [pages, tokens in a page, num_kv_heads, head_dim], or [pages, num_kv_heads,
            tokens in a page, head_dim] with layout HND: caches for `AttentionWrapper.run` with
            `kv_format`, for `append`, and for any code that follows `tables`. Without `page_size`
            a page is a slot with all its tokens.
        """
        self._checked_tenant()
        assert self._views is not None
        return self._views.kv(layer)

    def view(self, request: Hashable, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one request, as many as it has tokens.

        Returns:
            Two tensors [tokens, num_kv_heads, head_dim], or [num_kv_heads, tokens, head_dim] with
            layout HND, that share the cache's memory. They must not be used when it is released.
        """
        held = self._held(request)
        assert self._views is not None
        return self._views.of_slot(held.span.slot, held.tokens, layer)

    def tables(self, requests: Iterable[Hashable]) -> dict[str, Any]:
        """`kv_indptr`, `kv_indices` and `last_page_len` of a batch: of `plan`, and of `append`.

        They follow from slots and lengths alone.

        Args:
            requests: the batch, in the order of its queries.

        Returns:
            int32 arrays by name.
        """
        held = [self._held(request) for request in requests]
        return page_tables(
            self._geometry, [one.span.slot for one in held], [one.tokens for one in held]
        )

    def close(self) -> None:
        """End all requests and give all pages back, when the device is done with its work.

        Closing again does nothing. Tensors of the cache keep its addresses reserved, but there is
        no memory any longer.

        Raises:
            PageFailed: the driver refuses to unmap; the cache is closed all the same, and the next
                call that maps or closes, of any model, tries again.
            ForbiddenUnderCapture, OtherProcess: as `reserve`.
        """
        try:
            if self._tenant.is_open:
                self._mapper.remove(self._tenant)
        finally:
            if not self._tenant.is_open:  # also where the driver refused to unmap
                self._forget.detach()
                self._requests.clear()
                self._views = None

    def __enter__(self) -> VirtualCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        model = self._tenant.model
        tokens = sum(held.tokens for held in self._requests.values())
        return (
            f"VirtualCache({model.name}: {len(self._requests)} of {self.slots} requests, "
            f"{tokens} tokens, {model.used} pages, {model.surplus} of them reusable)"
        )

    def _length(self, name: str, request: Hashable, tokens: int) -> int:
        tokens = checked_number(name, tokens)
        if tokens > self.max_tokens:
            name, most = self._tenant.model.name, self.max_tokens
            raise RequestTooLong(request=request, tokens=tokens, model=name, most=most)
        return tokens

    def _ready(self, held: _Request) -> int:
        """Tokens that a request can have at once, counted anew: another thread may have mapped."""
        span = held.span
        held.ready = self._geometry.tokens(min(span.mapped, span.held))
        return held.ready

    def _held(self, request: Hashable) -> _Request:
        self._mapper.refuse_other_process()  # whose memory a forked one would write
        held = self._requests.get(request)
        if held is None or not self._tenant.is_open:
            tenant = self._checked_tenant()
            raise NotReserved(model=tenant.model.name, request=request)
        return held

    def _checked_tenant(self) -> Tenant:
        """The tenant; raises MemoryClosed if it has left the pool, OtherProcess in a forked one."""
        self._mapper.refuse_other_process()
        if not self._tenant.is_open:
            raise MemoryClosed(what=f"the cache of {self._tenant.model.name}")
        return self._tenant


def _storage(given: str | DType | torch.dtype) -> torch.dtype:
    try:
        found: torch.dtype = getattr(torch, kv_dtype(given).name)  # type: ignore[arg-type]
    except KeyError:
        raise UnsupportedSpec(
            what=f"dtype {given}",
            reason="caches hold float16, bfloat16, float32, float8_e4m3fn, float8_e5m2 or int8",
            remedy="Convert to one of them.",
        ) from None
    return found
