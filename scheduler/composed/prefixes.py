"""Prefixes that requests share, found in their page tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from warploom.scheduler.model.layout import Ints

_FIRST_LOOK = 64  # pages compared at first; each further comparison is twice as wide


@dataclass(frozen=True, eq=False)
class PrefixForest:
    """Runs of keys at the beginning of requests, each listed by two requests or more.

    Attributes:
        parent: (nodes,) the run that comes before, or -1. Parents stand before their children.
        begin, end: (nodes,) positions of the run's keys; multiples of the page size.
        first: (nodes,) a request whose page table lists the run.
        leaf: (requests,) the last run that a request shares, or -1.
    """

    parent: Ints
    begin: Ints
    end: Ints
    first: Ints
    leaf: Ints

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def length(self) -> Ints:
        """(nodes,) keys of each run."""
        return self.end - self.begin

    @property
    def depth(self) -> int:
        """Most runs on the path from a root to a request."""
        depth = np.zeros(len(self) + 1, np.int64)  # the last entry stands for "no run", -1
        for node, parent in enumerate(self.parent):
            depth[node] = depth[parent] + 1
        return int(depth.max())

    def without(self, requests: npt.NDArray[np.bool_]) -> PrefixForest:
        """The same runs, shared by all but these requests."""
        return replace(self, leaf=np.where(requests, -1, self.leaf))

    def sum_over_requests(self, values: Ints) -> Ints:
        """(nodes,) sum of a per-request value over the requests that share each run."""
        total = np.zeros(len(self) + 1, np.int64)
        np.add.at(total, self.leaf, values)
        for node in range(len(self) - 1, -1, -1):
            total[self.parent[node]] += total[node]
        return total[:-1]


def find_prefixes(
    starts: Ints, indices: npt.NDArray[np.int32], full_pages: Ints, page_size: int
) -> PrefixForest:
    """Finds the runs of pages with which the page tables of several requests begin.

    Args:
        starts: (requests,) where each request's pages begin.
        indices: the pages.
        full_pages: (requests,) pages of each request that are full: only those can be shared.
        page_size: tokens of a page.
    """
    nodes: list[tuple[int, int, int, int]] = []
    leaf = np.full(len(starts), -1, np.int64)
    waiting = [(members, 0, -1) for members in _by_page(starts, indices, full_pages, 0)]
    while waiting:
        members, depth, parent = waiting.pop()
        end = _common(starts[members], indices, depth, int(full_pages[members].min()))
        node = len(nodes)
        nodes.append((parent, depth * page_size, end * page_size, int(members[0])))
        leaf[members] = node
        further = members[full_pages[members] > end]
        for part in _by_page(starts[further], indices, full_pages[further], end):
            waiting.append((further[part], end, node))
    before, begin, last, first = np.array(nodes, np.int64).reshape(-1, 4).T
    return PrefixForest(before, begin, last, first, leaf)


def _by_page(
    starts: Ints, indices: npt.NDArray[np.int32], full_pages: Ints, depth: int
) -> Iterator[Ints]:
    """Groups of two requests or more, by index in `starts`, with the same page at a depth."""
    has = np.flatnonzero(full_pages > depth)
    if len(has) < 2:
        return
    page = indices[starts[has] + depth]
    order = np.argsort(page, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(page[order])) + 1, len(has))
    begins = np.append(0, ends[:-1])
    several = np.flatnonzero(ends - begins > 1)
    for begin, end in zip(begins[several].tolist(), ends[several].tolist(), strict=True):
        yield has[order[begin:end]]


def _common(starts: Ints, indices: npt.NDArray[np.int32], depth: int, limit: int) -> int:
    """How many of the first `limit` pages all these requests have in common."""
    width = _FIRST_LOOK
    while depth < limit:
        place = np.arange(depth, min(depth + width, limit))
        same = (indices[starts[:, None] + place] == indices[starts[0] + place]).all(axis=0)
        if not same.all():
            return depth + int(same.argmin())
        depth, width = int(place[-1]) + 1, 2 * width
    return depth
