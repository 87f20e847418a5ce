"""Whose each page is, and in which state: decisions alone, without memory, threads or devices.

xLLM's xTensor (section 4.3) keeps for each physical page its state and its owner. Here an owner is
a span, the addresses of one request of one model. Its pages come in rows, one page for each plane
of the span (such as the keys of a layer), since all planes grow together:

    row    0 ......... held ......... mapped          rows of a request are MAPPED, or ALLOCATED as
           |  MAPPED    |  REUSABLE    |              long as they have no addresses; what a former
           0 ......... mapped ....... held            request has left behind them is REUSABLE
           |  MAPPED    |  ALLOCATED   |

A released span keeps its addresses and is all REUSABLE: the next request that it fits takes it as
it is, and nothing is mapped. Whoever finds no FREE page takes the rows that were released first,
last rows first. Pages then change owner at once; that the old addresses must be unmapped before the
new ones are mapped is written down in `unmaps`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from warploom.memory_errors import (
    BudgetTooSmall,
    LimitReached,
    NotReserved,
    OutOfPages,
    OutOfSlots,
    PageStateBroken,
    PoolExhausted,
)


class State(IntEnum):
    """States of a page, as xLLM names them."""

    FREE = 0  # nobody's
    ALLOCATED = 1  # a request's, without an address
    MAPPED = 2  # a request's, at an address of its span
    REUSABLE = 3  # nobody's, still at an address of a span


@dataclass(eq=False)
class Span:
    """The addresses of one request at a time.

    Attributes:
        model: whose it is.
        slot: its number there.
        pages: row by row, one of each plane.
        mapped: rows that have addresses, from the first on.
        held: rows of the request, from the first on.
        is_live: there is a request.
        fence: what must have passed before REUSABLE rows are unmapped; the caller's.
    """

    model: Model
    slot: int
    pages: list[int] = field(default_factory=list)
    mapped: int = 0
    held: int = 0
    is_live: bool = False
    fence: Any = None

    @property
    def surplus(self) -> int:
        """REUSABLE rows."""
        return max(0, self.mapped - self.held)

    def row(self, index: int) -> list[int]:
        """Pages of a row, one for each plane."""
        planes = self.model.planes
        return self.pages[index * planes : (index + 1) * planes]


@dataclass(eq=False)
class Model:
    """One of those that share the pool.

    Attributes:
        name: for messages.
        planes: pages in a row.
        guaranteed: pages that no other model can take.
        limit: pages that it has at most.
        spans: by slot.
        used: pages it has, in any state but FREE.
        surplus: REUSABLE ones among them.
    """

    name: str
    planes: int
    guaranteed: int
    limit: int
    spans: list[Span] = field(default_factory=list, repr=False)
    used: int = 0
    surplus: int = 0

    @property
    def owed(self) -> int:
        """FREE pages that are kept for it."""
        return max(0, self.guaranteed - self.used)

    @property
    def spare(self) -> int:
        """REUSABLE pages, in whole rows, that others may take."""
        above = max(0, self.used - self.guaranteed) // self.planes * self.planes
        return min(self.surplus, above)


@dataclass(frozen=True)
class Unmap:
    """Rows that have lost their pages and must lose their addresses, when the fence has passed."""

    span: Span
    first: int
    rows: int
    fence: Any


class Ledger:
    """The states of all pages of a pool. One thread at a time.

    Attributes:
        num_pages: of the pool.
        unmaps: to be done before anything else is mapped, first in first out.
        models: that share the pool.
        reused: pages that a request took from an earlier one without being mapped anew.
    """

    def __init__(self, num_pages: int, page_bytes: int = 1) -> None:
        self.num_pages, self._page_bytes = num_pages, page_bytes
        self._free = list(range(num_pages - 1, -1, -1))  # the lowest is taken first
        self._released: dict[Span, None] = {}  # with surplus; the first released stands first
        self.unmaps: deque[Unmap] = deque()
        self.models: list[Model] = []
        self.reused = 0

    def add(self, name: str, planes: int, slots: int, guaranteed: int, limit: int) -> Model:
        """Let another model share the pool.

        Raises:
            BudgetTooSmall: the pool or the limit holds less than is guaranteed, or than a row.
            PoolExhausted: others hold what shall be guaranteed.
        """
        least = max(planes, guaranteed)
        for what, pages in (("the pool", self.num_pages), ("limit_bytes", limit)):
            if pages < least:
                why = "what is guaranteed" if guaranteed > planes else "the first page of each of "
                why += "" if guaranteed > planes else f"{planes} planes that a request has"
                size = self._page_bytes
                raise BudgetTooSmall(name=what, got=pages * size, needed=least * size, what=why)
        model = Model(name, planes, guaranteed, limit)
        owed = sum(other.owed for other in self.models)
        shortage = guaranteed + owed - len(self._free)
        spare = sum(other.spare for other in self.models)
        if shortage > spare:
            remedy = "Guarantee less, or let others release requests first."
            reason = "which it shall be guaranteed; the others hold or are guaranteed all but "
            reason += str(max(0, guaranteed - shortage + spare))
            raise self._out_of_pages(PoolExhausted, model, guaranteed, reason, remedy)
        self._reclaim(shortage, model)
        model.spans = [Span(model, slot) for slot in range(slots)]
        self.models.append(model)
        return model

    def remove(self, model: Model) -> None:
        """Free all pages of a model, whatever its requests do."""
        for span in model.spans:
            if span.is_live:
                self.release(span)
            self._drop(span, span.surplus)
        if model.used or model.surplus:
            raise PageStateBroken(reason=f"{model} is gone and has pages")
        self.models.remove(model)

    def open(self, model: Model, rows: int) -> Span:
        """A span for a new request, which then holds so many rows.

        Best fit: of the spans without a request, the one with the fewest rows that suffice, or
        else the one with the most; the lowest slot among equals.

        Raises:
            OutOfSlots: all spans have requests.
            LimitReached, PoolExhausted: too few pages; nothing has changed.
        """
        idle = [span for span in model.spans if not span.is_live]
        if not idle:
            raise OutOfSlots(slots=len(model.spans), model=model.name)
        enough = [span for span in idle if span.mapped >= rows]
        span = (
            min(enough, key=lambda span: span.mapped)
            if enough
            else max(idle, key=lambda span: span.mapped)
        )
        self.extend(span, rows)
        span.is_live = True
        return span

    def extend(self, span: Span, rows: int) -> None:
        """Let a request hold so many rows: those of an earlier request first, then others.

        Raises:
            LimitReached, PoolExhausted: too few pages; nothing has changed.
        """
        if rows <= span.held:
            return
        model, planes = span.model, span.model.planes
        missing = (rows - max(span.held, span.mapped)) * planes
        if missing > 0:
            self._make_room(span, missing)
            span.pages += [self._free.pop() for _ in range(missing)]
            model.used += missing
        taken = (min(rows, span.mapped) - min(span.held, span.mapped)) * planes
        model.surplus -= taken
        self.reused += taken
        span.held = rows
        if not span.surplus:
            self._released.pop(span, None)

    def map_held(self, span: Span) -> None:
        """Note that all rows of the request have addresses now."""
        span.mapped = max(span.mapped, span.held)

    def release(self, span: Span, fence: Any = None) -> None:
        """End a request: rows with addresses become REUSABLE, others FREE.

        Raises:
            NotReserved: there is no request.
        """
        if not span.is_live:
            raise NotReserved(model=span.model.name, request=f"in slot {span.slot}")
        model, planes = span.model, span.model.planes
        unmapped = span.pages[span.mapped * planes :]
        del span.pages[span.mapped * planes :]
        self._free += reversed(unmapped)
        model.used -= len(unmapped)
        model.surplus += min(span.held, span.mapped) * planes
        span.held, span.is_live, span.fence = 0, False, fence
        self._released.pop(span, None)
        if span.mapped:
            self._released[span] = None

    def trim(self, model: Model, pages: int | None = None) -> int:
        """Free REUSABLE pages of a model, those first that were released first.

        Args:
            model: whose.
            pages: how many, rounded up to whole rows; all by default.

        Returns:
            How many pages were freed.
        """
        before = model.surplus
        wanted = before if pages is None else min(pages, before)
        for span in [span for span in self._released if span.model is model]:
            rows = -(-(wanted - (before - model.surplus)) // model.planes)
            self._drop(span, min(rows, span.surplus))
        return before - model.surplus

    def counts(self) -> dict[State, int]:
        """Pages in each state, of all models."""
        reusable = sum(model.surplus for model in self.models)
        unmapped = sum(
            max(0, span.held - span.mapped) * model.planes
            for model in self.models
            for span in model.spans
        )
        used = sum(model.used for model in self.models)
        return {
            State.FREE: len(self._free),
            State.ALLOCATED: unmapped,
            State.MAPPED: used - reusable - unmapped,
            State.REUSABLE: reusable,
        }

    def pages(self) -> Iterator[tuple[int, State, Span | None]]:
        """Each page with its state and owner, found anew from the lists: for tests and tables."""
        for page in self._free:
            yield page, State.FREE, None
        for model in self.models:
            for span in model.spans:
                for i, page in enumerate(span.pages):
                    row = i // model.planes
                    held, mapped = row < span.held, row < span.mapped
                    state = State.MAPPED if held and mapped else State.ALLOCATED
                    yield page, state if held else State.REUSABLE, span

    def _make_room(self, span: Span, pages: int) -> None:
        """Have so many FREE pages that a span's model may take, or raise and change nothing."""
        model = span.model
        own = model.surplus - span.surplus * model.planes
        is_limited = model.limit < self.num_pages  # else the pool is its limit
        over = max(0, model.used + pages - model.limit) if is_limited else 0
        if over > own:
            reason = f"and has {model.used} of the {model.limit} that its limit allows"
            remedy = "Release a request, or declare a larger limit_bytes."
            raise self._out_of_pages(LimitReached, model, pages, reason, remedy)
        others = [other for other in self.models if other is not model]
        shortage = pages + sum(other.owed for other in others) - len(self._free)
        most = own + sum(other.spare for other in others)
        if shortage > most:
            reason = f"and {max(0, pages - shortage + most)} of {self.num_pages} can be had"
            remedy = (
                "Release a request, let another model release or trim, or make a larger pool. Pages"
                " that are guaranteed to others cannot be had."
            )
            raise self._out_of_pages(PoolExhausted, model, pages, reason, remedy)
        shortage -= self._reclaim(over, model, span, only=True)
        self._reclaim(shortage, model, span)

    def _reclaim(
        self, pages: int, model: Model, keep: Span | None = None, only: bool = False
    ) -> int:
        """Free REUSABLE rows until there are so many pages more, those released first at first.

        Args:
            pages: how many; whole rows are freed, so they may become more.
            model: who wants them: its own guarantee protects it from others alone.
            keep: a span whose rows stay.
            only: take the model's own.
        """
        got = 0
        for span in list(self._released) if pages > 0 else ():
            owner, planes = span.model, span.model.planes
            if span is keep or (only and owner is not model):
                continue
            most = span.surplus if owner is model else min(span.surplus, owner.spare // planes)
            rows = min(most, -(-(pages - got) // planes))
            self._drop(span, rows)
            got += rows * planes
            if got >= pages:
                break
        return got

    def _drop(self, span: Span, rows: int) -> None:
        """Free the last rows of a span, which are REUSABLE."""
        if rows <= 0:
            return
        model, count = span.model, rows * span.model.planes
        span.mapped -= rows
        self._free += reversed(span.pages[-count:])
        del span.pages[-count:]
        model.used -= count
        model.surplus -= count
        self.unmaps.append(Unmap(span, span.mapped, rows, span.fence))
        if not span.surplus:
            self._released.pop(span, None)

    def _out_of_pages(
        self, kind: type[OutOfPages], model: Model, pages: int, reason: str, remedy: str
    ) -> OutOfPages:
        size = self._page_bytes
        return kind(model=model.name, needed=pages, page_bytes=size, reason=reason, remedy=remedy)
