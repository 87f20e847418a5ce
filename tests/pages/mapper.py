"""Random calls of a mapper over the CPU's pages, whose driver refuses now and then.

The driver is the one of the CPU, so that pages are real: what a request holds is filled with bytes
of its own and looked at again, and two requests with one page would be found out. In between stands
a driver that refuses to make, map or unmap pages at random points: also behind a few of those that
it was to map, and when these are to be unmapped again. It keeps book of what is mapped where, which
must be what the ledger says.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

import torch

from warploom.memory_errors import PageFailed, VirtualMemoryError
from warploom.serving.virtual_memory.geometry import Geometry
from warploom.serving.virtual_memory.host_driver import HostDriver
from warploom.serving.virtual_memory.ledger import Ledger, Model, Span
from warploom.serving.virtual_memory.mapper import Mapper, Tenant

PAGE, MOST_ROWS = 4096, 6
REFUSED = PageFailed(call="a call", size="4 KiB", reason="refused", remedy="Try again.")
PLANES, RECORDS = ("layer", "kv", "token", "head"), ("token", "layer", "kv", "head")


class RefusingDriver(HostDriver):
    """The driver of the CPU with a book, and refusals.

    Attributes:
        chance: of a refusal, of each call that may be refused.
        made: handles that are there.
        mapped: handle at each address.
        bare: addresses without a page, of calls that were refused midway.
        last: the call that was refused last, since `begin`.
    """

    def __init__(self, rng: random.Random, num_pages: int) -> None:
        super().__init__(PAGE, num_pages)
        self._rng = rng
        self.chance, self.made, self.mapped = 0.0, set[int](), dict[int, int]()
        self.refused, self.bare, self.last = Counter[str](), set[int](), ""

    def begin(self, chance: float) -> None:
        """A call of the mapper begins."""
        self.chance, self.last = chance, ""

    def create(self, page: int) -> int:
        if self._refuses("create"):
            raise REFUSED
        handle = super().create(page)
        assert handle not in self.made, "made twice"
        self.made.add(handle)
        return handle

    def destroy(self, handle: int) -> None:
        assert handle not in self.mapped.values(), "destroyed while it is mapped"
        self.made.remove(handle)
        super().destroy(handle)

    def map(self, address: int, handles: Sequence[int]) -> None:
        places = {address + i * PAGE: handle for i, handle in enumerate(handles)}
        assert not places.keys() & self.mapped.keys(), "mapped over a page"
        assert self.made.issuperset(handles)
        refuses = self._refuses("map")
        count = self._rng.randrange(len(handles)) if refuses else len(handles)
        super().map(address, handles[:count])
        self.mapped |= dict(islice(places.items(), count))
        if refuses:
            self.bare |= places.keys() - self.mapped.keys()
            raise REFUSED

    def unmap(self, address: int, pages: int) -> None:
        if self._refuses("unmap"):
            raise REFUSED
        for place in range(address, address + pages * PAGE, PAGE):
            if place in self.bare:
                self.bare.remove(place)
            else:
                del self.mapped[place]  # KeyError: nothing is there
        super().unmap(address, pages)

    def _refuses(self, call: str) -> bool:
        if self._rng.random() >= self.chance:
            return False
        self.refused[call] += 1
        self.last = call
        return True


class Fuzz:
    """A mapper, and what its requests have written."""

    def __init__(self, rng: random.Random, calls: Counter[str]) -> None:
        self.rng, self.calls = rng, calls
        self.num_pages = rng.randint(4, 60)
        self.driver = RefusingDriver(rng, self.num_pages)
        self.ledger = Ledger(self.num_pages, PAGE)
        self.mapper = Mapper(self.driver, self.ledger, preallocate=False)
        self.memory: dict[Tenant, torch.Tensor] = {}
        self.all_tenants: dict[Model, Tenant] = {}  # closed ones, too
        self.live: dict[Span, Tenant] = {}
        self.stamps: dict[tuple[Span, int, int], int] = {}  # of each plane and row

    def step(self) -> None:
        """One random call, which may be refused; then everything is looked at."""
        name = self.rng.choices(
            ("add", "open", "grow", "ahead", "release", "trim", "remove"),
            (1, 20, 30, 15, 15, 3, 0.5),
        )[0]
        if not self.memory:
            name = "add"
        if name in ("grow", "ahead", "release") and not self.live:
            name = "open"
        self.driver.begin(self.rng.choice((0.0, 0.0, 0.3)))
        failed = sum(self.driver.refused.values())
        self.calls[name] += 1
        try:
            getattr(self, f"_{name}")()
        except PageFailed:
            assert sum(self.driver.refused.values()) > failed
            self.calls[f"{name}: PageFailed"] += 1
        except VirtualMemoryError as error:
            self.calls[f"{name}: {type(error).__name__}"] += 1
        else:
            assert sum(self.driver.refused.values()) == failed, "a refusal is told"
        self.check()

    def _add(self) -> None:
        if len(self.memory) == 4:
            return
        order = self.rng.choice((PLANES, RECORDS))
        sizes = {"layer": 1, "kv": 2, "head": 2}
        tokens = self.rng.randint(1, MOST_ROWS * 8)
        geometry = Geometry(sizes, 64, 4, order, tokens, PAGE, page_size=1)
        guaranteed = self.rng.choice((0, 0, self.rng.randint(0, self.num_pages // 3)))
        limit = self.rng.choice((self.num_pages, self.rng.randint(1, self.num_pages)))
        slots = self.rng.randint(1, 5)
        tenant, memory = self.mapper.add("model", geometry, slots, guaranteed, limit)
        self.memory[tenant] = memory
        self.all_tenants[tenant.model] = tenant

    def _open(self) -> None:
        tenant = self.rng.choice(list(self.memory))
        rows = self.rng.randint(0, tenant.geometry.max_rows)
        self.live[self.mapper.open(tenant, rows)] = tenant

    def _grown(self, span: Span) -> int:
        return min(span.held + self.rng.choice((0, 1, 1, 3)), self.live[span].geometry.max_rows)

    def _grow(self) -> None:
        span = self.rng.choice(list(self.live))
        self.mapper.map(self.live[span], span, self._grown(span))
        assert span.mapped >= span.held

    def _ahead(self) -> None:
        tenant = self.live[self.rng.choice(list(self.live))]
        spans = [span for span, owner in self.live.items() if owner is tenant]
        self.mapper.extend((span, self._grown(span)) for span in spans)
        self.mapper.map_later(tenant, spans, None).result(30)

    def _release(self) -> None:
        span = self.rng.choice(list(self.live))
        self.mapper.release(span)
        del self.live[span]

    def _trim(self) -> None:
        tenant = self.rng.choice(list(self.memory))
        self.mapper.trim(tenant.model, self.rng.choice((None, self.rng.randint(0, 8))))

    def _remove(self) -> None:
        tenant = self.rng.choice(list(self.memory))
        del self.memory[tenant]
        self.live = {span: owner for span, owner in self.live.items() if owner is not tenant}
        self.mapper.remove(tenant)  # refused, it is closed all the same
        assert not tenant.is_open

    def check(self) -> None:
        """The driver has mapped what the ledger says; requests have what they have written."""
        expected: dict[int, int] = {}
        for tenant in self.memory:
            for span in tenant.model.spans:
                for row in range(span.mapped):
                    for plane, page in enumerate(span.row(row)):
                        expected[tenant.address(span, plane, row)] = page * PAGE
        extra = self.driver.mapped.keys() - expected.keys()
        assert expected.items() <= self.driver.mapped.items() and extra <= self._to_unmap()
        stats = self.mapper.stats()
        assert stats.free + stats.allocated + stats.mapped + stats.reusable == self.num_pages
        assert stats.mapped + stats.reusable == len(expected)
        pages = [page for page, _, _ in self.ledger.pages()]
        assert sorted(pages) == list(range(self.num_pages)), "each page is in one place"
        self._write_and_read()

    def _to_unmap(self) -> set[int]:
        """Addresses of rows that the ledger has taken or that were mapped in vain, still there."""
        due = ((address, pages) for address, pages, _ in self.mapper._due)
        left = {address + i * PAGE for address, pages in due for i in range(pages)}
        return left | {
            self.all_tenants[unmap.span.model].address(unmap.span, plane, row)
            for unmap in self.ledger.unmaps
            for plane in range(unmap.span.model.planes)
            for row in range(unmap.first, unmap.first + unmap.rows)
        }

    def _write_and_read(self) -> None:
        """Each page of a live request has its stamp; new ones get theirs."""
        kept = dict[tuple[Span, int, int], int]()
        for span, tenant in self.live.items():
            for row in range(min(span.mapped, span.held)):
                for plane in range(tenant.geometry.planes):
                    place, memory = (span, plane, row), self.memory[tenant]
                    at = tenant.geometry.offset(span.slot, plane, row)
                    ends = memory[at : at + PAGE : PAGE - 1]
                    if place in self.stamps:
                        assert ends.tolist() == [self.stamps[place]] * 2, "another has written here"
                    kept[place] = self.stamps.get(place, self.rng.randrange(256))
                    ends.fill_(kept[place])
        self.stamps = kept

    def close(self) -> None:
        """Nothing is left: no page at an address, no memory, no addresses that nobody has.

        Before, a model is removed and, mostly, its pages are not unmapped.
        """
        self.driver.begin(0.8)
        if self.memory:
            with suppress(PageFailed):
                self._remove()
        self.driver.begin(0.0)
        self.mapper.close()
        assert not self.driver.mapped and not self.driver.made and not self.driver.bare
        assert not self.mapper._tenants


def run(operations: int, seed: int, per_pool: int = 500) -> Counter[str]:
    """Raises AssertionError where something is not so; returns what was done, by call and error."""
    rng, calls = random.Random(seed), Counter[str]()
    for first in range(0, operations, per_pool):
        fuzz = Fuzz(rng, calls)
        for _ in range(min(per_pool, operations - first)):
            fuzz.step()
        fuzz.close()
        for call, count in fuzz.driver.refused.items():
            calls[f"refused by the driver: {call}"] += count
    return calls
