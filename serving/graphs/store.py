"""Captures within a budget of memory: what was not used for longest goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from warploom.graph_errors import BudgetBelowCapture
from warploom.serving.graphs.driver import Capture, GraphDriver
from warploom.serving.graphs.pieces import Flow, Mode, Section

Key = tuple[Mode, int]  # the mode and the bucket
Make = Callable[[], "Entry"]


@dataclass(frozen=True)
class Link:
    """A section of a captured step; without a capture it runs eagerly.

    Attributes:
        flow: what it gives, in the buffers between sections.
    """

    section: Section
    capture: Capture | None = None
    flow: Flow = ()


@dataclass(frozen=True)
class Entry:
    """All of a step, captured for a bucket in a mode.

    Attributes:
        seconds: that capturing took.
    """

    key: Key
    links: tuple[Link, ...]
    seconds: float

    @property
    def captures(self) -> Iterator[Capture]:
        return (link.capture for link in self.links if link.capture is not None)

    @property
    def own_bytes(self) -> int:
        return sum(capture.own_bytes for capture in self.captures)

    def close(self) -> None:
        for capture in self.captures:
            capture.close()


class Store:
    """Entries by key, the least recently used first.

    Attributes:
        max_bytes: of all captures together; None is no limit.
        captures, evictions: of entries, since the beginning.
    """

    def __init__(self, driver: GraphDriver, max_bytes: int | None) -> None:
        self._driver, self.max_bytes = driver, max_bytes
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._too_large: dict[Key, int] = {}  # what did not fit alone, and bytes that it takes
        self.captures = self.evictions = 0
        self.capture_seconds = 0.0

    @property
    def num_bytes(self) -> int:
        """What captures hold: memory that they share, and what each has of its own."""
        own = sum(entry.own_bytes for entry in self._entries.values())
        return self._driver.shared_bytes + own

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def get(self, key: Key, make: Make, what: str) -> Entry:
        """The entry, which is made and kept if there is none; others may have to go.

        Raises:
            BudgetBelowCapture: it does not fit the budget alone.
            GraphError: `make` fails, and nothing has changed.
        """
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
            return found
        if key not in self._too_large:
            made = self._add(key, make)
            if self.max_bytes is not None and made.own_bytes > self.max_bytes:
                self._refuse(key, made.own_bytes)  # before others go for nothing
                self._clear_if_over()
            else:
                made = self._make_room(key, made, make)
            if key not in self._too_large:
                return made
        raise BudgetBelowCapture(got=self.max_bytes, what=what, needed=self._too_large[key])

    def add_if_it_fits(self, key: Key, make: Make) -> bool:
        """Make an entry and keep it, unless another would have to go for it.

        Others go nevertheless where the attempt has enlarged what they share beyond the budget.
        """
        if key in self._too_large:
            return False
        self._add(key, make)
        if self._is_over():
            self._drop(key)
            self._clear_if_over()
            return False
        return True

    def clear(self) -> None:
        """Close all entries, and try again what did not fit."""
        self._close_all()
        self._too_large.clear()

    def _close_all(self) -> None:
        self._driver.drain()
        for entry in self._entries.values():
            entry.close()
        self._entries.clear()

    def _add(self, key: Key, make: Make) -> Entry:
        made = self._entries[key] = make()
        self.captures += 1
        self.capture_seconds += made.seconds
        return made

    def _is_over(self) -> bool:
        return self.max_bytes is not None and self.num_bytes > self.max_bytes

    def _make_room(self, key: Key, made: Entry, make: Make) -> Entry:
        """Let others go for what was made; it is refused if it is over the budget alone."""
        self._evict_others(key)
        if self._is_over() and self.captures > 1:
            # what they shared grew for others: it goes back when all are gone, and no earlier
            self._drop(key)
            made = self._add(key, make)
        if self._is_over():
            self._refuse(key, self.num_bytes)
        return made

    def _refuse(self, key: Key, needed: int) -> None:
        self._too_large[key] = needed
        self._drop(key)

    def _evict_others(self, key: Key) -> None:
        while self._is_over() and next(iter(self._entries)) != key:
            self._drop(next(iter(self._entries)))
            self.evictions += 1

    def _clear_if_over(self) -> None:
        """Begin anew where one that is gone has left more shared memory than there may be."""
        if self._is_over():
            self.evictions += len(self._entries)
            self._close_all()

    def _drop(self, key: Key) -> None:
        self._driver.drain()
        self._entries.pop(key).close()
