"""What growth of requests costs the host: lists of pages beside memory that is mapped.

Growth begins behind the first page, which comes with a prompt; requests are equally long, so that
all need a page in the same step. Where memory is mapped ahead, a step that needs pages finds them
taken, and the step so many tokens before it took them: each kind has figures of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from harness import Report
from virtual_model import MIB, MODEL, PAGE, TOKENS_OF_A_PAGE, add, repeated

import warploom as wl

AHEAD = 2  # tokens for which memory is mapped during a step
DEVICE_STEP = 2e-3  # seconds that the host waits for the device, while memory is mapped
PARTS = {"p50": 0.5, "p99": 0.99, "longest": 1.0}


class PagedAllocator:
    """What a paged cache needs for growth: a list of free pages, and one of pages per request."""

    def __init__(self, pages: int) -> None:
        self.free = list(range(pages))
        self.tables: dict[int, list[int]] = {}

    def grow(self, request: int, tokens: int) -> None:
        table = self.tables.setdefault(request, [])
        while len(table) * PAGE < tokens:
            table.append(self.free.pop())

    def release(self, request: int) -> None:
        self.free += self.tables.pop(request)

    def plan_arguments(self, lens: dict[int, int]) -> dict[str, Any]:
        """As `VirtualCache.tables`."""
        tables = [self.tables[request] for request in lens]
        indptr = torch.tensor([0, *map(len, tables)], dtype=torch.int32).cumsum(0)
        indices = torch.tensor([page for table in tables for page in table], dtype=torch.int32)
        last = torch.tensor([(n - 1) % PAGE + 1 for n in lens.values()], dtype=torch.int32)
        return {"kv_indptr": indptr, "kv_indices": indices, "last_page_len": last}


def step_times(tokens: int, step: Callable[[int], object], pause: float = 0.0) -> list[float]:
    """Microseconds of each step of a generation, in which every request grows by a token."""
    times = []
    for length in range(1, tokens + 1):
        begin = time.perf_counter_ns()
        step(length)
        times.append((time.perf_counter_ns() - begin) / 1e3)
        if pause:
            time.sleep(pause)  # the device's step, while which the host waits
    return times


def begins_page(length: int) -> bool:
    """Whether the last of so many tokens is the first of a page, other than of the first one."""
    return length > 1 and (length - 1) % TOKENS_OF_A_PAGE == 0


@dataclass(frozen=True)
class Growth:
    """Microseconds of steps of some generations.

    Attributes:
        steps: of all steps.
        needing: of those in which all requests have the first token of a page.
        taking: of those that take pages for a later step.
        maps: pages that the driver mapped in one generation.
    """

    steps: list[float]
    needing: list[float]
    taking: list[float] = field(default_factory=list)
    maps: int = 0

    @classmethod
    def of(cls, generations: Sequence[Sequence[float]], maps: int = 0, ahead: int = 0) -> Growth:
        numbered = [step for times in generations for step in enumerate(times, 1)]
        return cls(
            [us for _, us in numbered],
            [us for length, us in numbered if begins_page(length)],
            [us for length, us in numbered if ahead and begins_page(length + ahead)],
            maps,
        )


@dataclass(frozen=True)
class Virtual:
    """Generations of equally long requests over a virtual cache."""

    pool: wl.MemoryPool
    cache: wl.VirtualCache
    names: range
    tokens: int

    def growth(self, turns: int, reserved: int = 0, trim: bool = True, ahead: int = 0) -> Growth:
        """Of so many generations; `trim`: nothing that one has mapped is left for the next."""
        ran = [self.generation(reserved, trim, ahead) for _ in range(turns)]
        return Growth.of([times for times, _ in ran], ran[-1][1], ahead)

    def generation(self, reserved: int, trim: bool, ahead: int) -> tuple[list[float], int]:
        """Times of the steps, and pages mapped in them; the first page comes with a prompt."""
        self.begin(reserved, 1)
        before = self.pool.stats().maps
        times = step_times(self.tokens, partial(self._step, ahead=ahead), DEVICE_STEP * bool(ahead))
        mapped = self.pool.stats().maps - before
        for request in self.names:
            self.cache.release(request)
        if trim:
            self.cache.trim()
        return times, mapped

    def begin(self, reserved: int, length: int) -> None:
        for request in self.names:
            self.cache.reserve(request, reserved)
            self.cache.grow(request, length)

    def _step(self, length: int, ahead: int) -> None:
        for request in self.names:
            self.cache.grow(request, length)
        if ahead:
            self.cache.map_ahead(self.names, ahead)


def of_pages(paged: PagedAllocator, names: range, tokens: int) -> list[float]:
    """Steps of one generation over a list of pages."""

    def step(length: int) -> None:
        for request in names:
            paged.grow(request, length)

    times = step_times(tokens, step)
    for request in names:
        paged.release(request)
    return times


def growth(report: Report, device: torch.device, quick: bool) -> None:
    requests, tokens, turns = (4, 64, 2) if quick else (8, 512, 5)
    names = range(requests)
    paged = PagedAllocator(requests * tokens // PAGE)
    memory = requests * (tokens // TOKENS_OF_A_PAGE + 1) * 2 * MIB
    with wl.MemoryPool(memory, device) as pool, wl.VirtualCache(pool, **MODEL) as cache:
        virtual = Virtual(pool, cache, names, tokens)
        virtual.generation(0, trim=True, ahead=AHEAD)  # first touch of memory, the thread's start
        ways = {
            "paged": Growth.of([of_pages(paged, names, tokens) for _ in range(turns)]),
            "virtual, mapped by grow": virtual.growth(turns),
            "virtual, mapped ahead": virtual.growth(turns, ahead=AHEAD),
        }
        virtual.generation(tokens, trim=False, ahead=0)
        ways["virtual, taken over"] = virtual.growth(turns, tokens, trim=False)
        params = {"requests": requests, "tokens": tokens, "page_bytes": pool.page_bytes}
        add_growth(report, ways, params)
        virtual.begin(tokens, tokens)
        for request in names:
            paged.grow(request, tokens)
        calls = {
            "paged": partial(paged.plan_arguments, dict.fromkeys(names, tokens)),
            "virtual, taken over": partial(cache.tables, names),
        }
        for way, call in calls.items():
            times = repeated(call, 20 if quick else 300)
            add(report, "page tables of a batch", way, statistics.median(times), times, params)


def add_growth(report: Report, ways: dict[str, Growth], params: dict[str, Any]) -> None:
    """Rows of each way: a token of all steps, steps that need pages, and that take them ahead."""
    for way, found in ways.items():
        own = {**params, "maps": found.maps}
        mean = statistics.fmean(found.steps) / params["requests"]
        add(report, "a token, mean", way, mean, found.steps, own)
        kinds = {"needs pages": found.needing, "takes pages ahead": found.taking}
        for kind, times in kinds.items():
            ordered = sorted(times)
            for name, part in PARTS.items() if ordered else ():
                us = ordered[min(int(part * len(ordered)), len(ordered) - 1)]
                add(report, f"a step that {kind}, {name}", way, us, ordered, own)
