"""The parts of a wrapper, which users have no names for."""

from __future__ import annotations

from warploom.runtime.wrappers.compiled import Compiled
from warploom.runtime.wrappers.prefetching import PageTable
from warploom.runtime.wrappers.wrapper import AttentionWrapper


def compiled(wrapper: AttentionWrapper) -> Compiled:
    """Kernels, parameters, memory, planner and launcher; the reference has none."""
    assert wrapper._compiled is not None
    return wrapper._compiled


def page_tables(wrapper: AttentionWrapper) -> list[PageTable]:
    """What the wrapper has prefetched, in the order of first calls."""
    return list(wrapper._page_prefetcher.tables.values())
