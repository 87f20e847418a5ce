"""A twin of the ledger of pages, in plain NumPy, and random operations on both side by side.

The twin has one matrix of states, of each row of each slot, and looks everything up there anew. It
takes pages one row at a time and undoes what it did where that is not enough. What the ledger wants
unmapped and mapped is done to a third thing, a table of addresses, which refuses what a device
would: to map over a page, and to unmap where there is none.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

from warploom.memory_errors import (
    BudgetTooSmall,
    LimitReached,
    NotReserved,
    OutOfSlots,
    PoolExhausted,
    VirtualMemoryError,
)
from warploom.serving.virtual_memory.ledger import Ledger, Model, Span, State

# plain ints, which NumPy compares faster than enums; NONE is a row that has no page
NONE, ALLOCATED, MAPPED, REUSABLE = map(int, State)


@dataclass
class Kind:
    """A model as the twin knows it; all in pages but `slots` and `rows`."""

    planes: int
    slots: int
    guaranteed: int
    limit: int
    rows: int


class Twin:
    """States of all rows; slots of all models lie one behind the other."""

    def __init__(self, num_pages: int, max_rows: int) -> None:
        self.num_pages = num_pages
        self.cells = np.zeros((0, max_rows), np.int8)
        self.owner = np.zeros(0, int)  # model of each slot
        self.live = np.zeros(0, bool)
        self.tick = np.zeros(0, int)  # of the last release
        self.kinds: dict[int, Kind] = {}
        self.now = 0

    def used(self) -> dict[int, int]:
        """Pages of each model."""
        rows = np.count_nonzero(self.cells, axis=1)
        return {
            model: int(rows[self.owner == model].sum()) * kind.planes
            for model, kind in self.kinds.items()
        }

    def free(self, used: dict[int, int]) -> int:
        return self.num_pages - sum(used.values())

    def owed(self, used: dict[int, int], but: int | None = None) -> int:
        """What is kept for all models but one."""
        return sum(
            max(0, kind.guaranteed - used[model])
            for model, kind in self.kinds.items()
            if model != but
        )

    def open_to(self, model: int | None) -> int:
        """FREE pages that a model may take."""
        used = self.used()
        return self.free(used) - self.owed(used, model)

    def add(self, model: int, kind: Kind) -> type[VirtualMemoryError] | None:
        if max(kind.guaranteed, kind.planes) > min(self.num_pages, kind.limit):
            return BudgetTooSmall
        before = self.cells.copy()
        while self.open_to(None) < kind.guaranteed:
            if not self.drop_oldest(model):
                self.cells = before
                return PoolExhausted
        self.kinds[model] = kind
        empty = np.zeros((kind.slots, self.cells.shape[1]), np.int8)
        self.cells = np.concatenate([self.cells, empty])
        self.owner = np.concatenate([self.owner, np.full(kind.slots, model)])
        self.live = np.concatenate([self.live, np.zeros(kind.slots, bool)])
        self.tick = np.concatenate([self.tick, np.zeros(kind.slots, int)])
        return None

    def remove(self, model: int) -> None:
        keep = self.owner != model
        self.cells, self.owner = self.cells[keep], self.owner[keep]
        self.live, self.tick = self.live[keep], self.tick[keep]
        del self.kinds[model]

    def open(self, model: int, rows: int) -> type[VirtualMemoryError] | int:
        idle = np.flatnonzero((self.owner == model) & ~self.live)
        if not idle.size:
            return OutOfSlots
        sizes = (self.cells[idle] != NONE).sum(1)
        enough = sizes >= rows
        at = idle[enough][sizes[enough].argmin()] if enough.any() else idle[sizes.argmax()]
        error = self.extend(int(at), rows)
        if error is not None:
            return error
        self.live[at] = True
        return int(at)

    def extend(self, at: int, rows: int) -> type[VirtualMemoryError] | None:
        model, before = int(self.owner[at]), self.cells.copy()
        kind, cells = self.kinds[model], self.cells[at]
        need = int((cells[:rows] == NONE).sum()) * kind.planes
        keep = np.arange(len(self.owner)) == at
        limit = kind.limit if kind.limit < self.num_pages else 2 * self.num_pages + need
        while need and self.used()[model] + need > limit:
            if not self.drop_oldest(model, but=keep, only=True):
                self.cells = before
                return LimitReached
        while need and self.open_to(model) < need:
            if not self.drop_oldest(model, but=keep):
                self.cells = before
                return PoolExhausted
        cells = self.cells[at]
        cells[:rows][cells[:rows] == REUSABLE] = MAPPED
        cells[:rows][cells[:rows] == NONE] = ALLOCATED
        return None

    def drop_oldest(self, model: int, but: np.ndarray | bool = False, only: bool = False) -> bool:
        """Free the last row of the slot released first whose row the model may take."""
        takes = (self.cells == REUSABLE).any(1) & ~np.asarray(but)
        used = self.used()
        for other, kind in self.kinds.items():
            if other != model and (only or used[other] - kind.planes < kind.guaranteed):
                takes &= self.owner != other
        if not takes.any():
            return False
        at = np.flatnonzero(takes)[self.tick[takes].argmin()]
        self.cells[at, np.flatnonzero(self.cells[at] == REUSABLE)[-1]] = NONE
        return True

    def map(self, at: int) -> None:
        self.cells[at][self.cells[at] == ALLOCATED] = MAPPED

    def release(self, at: int) -> type[VirtualMemoryError] | None:
        if not self.live[at]:
            return NotReserved
        cells = self.cells[at]
        cells[cells == ALLOCATED] = NONE
        cells[cells == MAPPED] = REUSABLE
        self.now += 1
        self.live[at], self.tick[at] = False, self.now
        return None

    def trim(self, model: int, pages: int | None) -> int:
        mine, freed = self.owner == model, 0
        total = int((self.cells[mine] == REUSABLE).sum()) * self.kinds[model].planes
        while freed < (total if pages is None else min(pages, total)):
            assert self.drop_oldest(model, but=~mine, only=True)
            freed += self.kinds[model].planes
        return freed


class SideBySide:
    """A ledger, its twin and a table of addresses; every operation is compared."""

    def __init__(self, num_pages: int, max_rows: int) -> None:
        self.ledger, self.twin = Ledger(num_pages), Twin(num_pages, max_rows)
        self.models: dict[int, Model] = {}
        self.table: dict[tuple[int, int, int], int] = {}  # (span, plane, row) -> page
        self.names = 0
        self.done = Counter[str]()  # operations by name, and by name and error

    def spans(self) -> list[Span]:
        """In the order of the twin's slots."""
        return [span for model in self.models.values() for span in model.spans]

    def count(self, name: str, error: type[VirtualMemoryError] | None = None) -> None:
        self.done[name] += 1
        if error is not None:
            self.done[f"{name}: {error.__name__}"] += 1

    def add(self, kind: Kind) -> None:
        expected, name = self.twin.add(self.names, kind), self.names
        self.names += 1
        sizes = kind.planes, kind.slots, kind.guaranteed, kind.limit
        got = raised(lambda: self.models.update({name: self.ledger.add(str(name), *sizes)}))
        assert got is expected, (got, expected)
        self.count("add", expected)

    def remove(self, name: int) -> None:
        self.count("remove")
        self.twin.remove(name)
        self.ledger.remove(self.models[name])
        self.flush()
        del self.models[name]

    def open(self, name: int, rows: int) -> None:
        rows = min(rows, self.twin.kinds[name].rows)
        expected = self.twin.open(name, rows)
        found: list[Span] = []
        got = raised(lambda: found.append(self.ledger.open(self.models[name], rows)))
        if isinstance(expected, int):
            assert got is None and self.spans().index(found[0]) == expected
        else:
            assert got is expected, (got, expected)
        self.count("open", None if isinstance(expected, int) else expected)

    def extend(self, at: int, rows: int) -> None:
        rows = min(rows, self.twin.kinds[int(self.twin.owner[at])].rows)
        if not self.twin.live[at]:
            return
        expected, span = self.twin.extend(at, rows), self.spans()[at]
        got = raised(lambda: self.ledger.extend(span, rows))
        assert got is expected, (got, expected)
        self.count("extend", expected)

    def map(self, at: int) -> None:
        self.count("map")
        self.flush()
        self.twin.map(at)
        span = self.spans()[at]
        for row in range(span.mapped, span.held):
            for plane, page in enumerate(span.row(row)):
                place = id(span), plane, row
                assert place not in self.table, "mapped over a page"
                self.table[place] = page
        self.ledger.map_held(span)

    def release(self, at: int) -> None:
        expected, span = self.twin.release(at), self.spans()[at]
        assert raised(lambda: self.ledger.release(span)) is expected
        self.count("release", expected)

    def trim(self, name: int, pages: int | None) -> None:
        assert self.ledger.trim(self.models[name], pages) == self.twin.trim(name, pages)
        self.count("trim")

    def flush(self) -> None:
        while self.ledger.unmaps:
            unmap = self.ledger.unmaps.popleft()
            for row in range(unmap.first, unmap.first + unmap.rows):
                for plane in range(unmap.span.model.planes):
                    del self.table[id(unmap.span), plane, row]  # KeyError: nothing is there

    def compare(self) -> None:
        """Counts, and the state of each row; cheap enough for each operation."""
        twin, spans = self.twin, self.spans()
        shape = len(spans), 1
        held, mapped = (
            np.fromiter((getattr(span, name) for span in spans), int).reshape(shape)
            for name in ("held", "mapped")
        )
        row = np.arange(twin.cells.shape[1])
        is_held, is_mapped = row < held, row < mapped
        states = ALLOCATED * is_held + is_mapped * (REUSABLE - is_held * 2)
        assert (states == twin.cells).all()
        assert [span.is_live for span in spans] == twin.live.tolist()
        counts = self.ledger.counts()
        used = twin.used()
        assert counts[State.FREE] == twin.free(used) and sum(counts.values()) == twin.num_pages
        assert twin.free(used) >= twin.owed(used), "what is guaranteed is kept"
        for name, model in self.models.items():
            assert model.used == used[name] <= model.limit

    def compare_pages(self) -> None:
        """Each page is in one place, and the table of addresses has the mapped ones alone."""
        pages = list(self.ledger.pages())
        assert sorted(page for page, _, _ in pages) == list(range(self.ledger.num_pages))
        found = {state: sum(one is state for _, one, _ in pages) for state in State}
        assert found == self.ledger.counts()
        self.flush()
        expected = {
            (id(span), plane, row): page
            for span in self.spans()
            for row in range(span.mapped)
            for plane, page in enumerate(span.row(row))
        }
        assert self.table == expected


def raised(call: object) -> type[VirtualMemoryError] | None:
    try:
        call()  # type: ignore[operator]
    except VirtualMemoryError as error:
        return type(error)
    return None


def random_kind(rng: random.Random, num_pages: int, max_rows: int) -> Kind:
    return Kind(
        rng.choice((1, 1, 2, 3, 8)),
        rng.randint(1, 6),
        rng.choice((0, 0, rng.randint(0, num_pages // 3))),
        rng.choice((num_pages, rng.randint(1, num_pages))),
        rng.randint(1, max_rows),
    )


def random_operation(both: SideBySide, rng: random.Random) -> None:
    pages, rows = both.twin.num_pages, both.twin.cells.shape[1]
    slots = len(both.twin.owner)
    chance = rng.random()
    if len(both.models) < 2 or (chance < 0.004 and len(both.models) < 5):
        both.add(random_kind(rng, pages, rows))
    elif chance < 0.006:
        both.remove(rng.choice(list(both.models)))
    elif chance < 0.03:
        name = rng.choice(list(both.models))
        both.trim(name, rng.choice((None, rng.randint(0, 20))))
    elif chance < 0.28:
        both.open(rng.choice(list(both.models)), rng.randint(0, rows))
    elif chance < 0.5:
        both.release(rng.randrange(slots))  # a released one, too
    elif chance < 0.75:
        at = rng.randrange(slots)
        both.extend(at, both.spans()[at].held + rng.choice((1, 1, 2, rng.randint(0, rows))))
    else:
        both.map(rng.randrange(slots))


def run(operations: int, seed: int, pages_every: int = 50) -> Counter[str]:
    """Raises AssertionError where the two differ; begins anew now and then.

    Returns:
        How often each operation was done, and how often it ended with which error.
    """
    rng, done = random.Random(seed), Counter[str]()
    both = SideBySide(8, 4)
    for number in range(operations):
        if number % 5000 == 0:
            both = SideBySide(rng.randint(1, 160), rng.randint(1, 16))
            both.done = done
        random_operation(both, rng)
        both.compare()
        if number % pages_every == 0:
            both.compare_pages()
    return done
