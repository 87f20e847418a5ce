"""The order in which chunks are assigned: longest first, but chunks that share keys in a row."""

from __future__ import annotations

import numpy as np

from warploom.scheduler.model.constants import TOLERANCE
from warploom.scheduler.model.layout import Ints
from warploom.scheduler.model.problem import Problem, sections


def assigning_order(problem: Problem, cost: Ints, segment: Ints, mean: int) -> tuple[Ints, Ints]:
    """Orders the chunks of all heads: section by section, if there are any, then longest first.

    Args:
        problem: a problem of one tile.
        cost, segment, mean: see `longest_first`.

    Returns:
        (n * num_kv_heads,) chunk and head of each item.
    """
    chunk, head = longest_first(cost, segment, mean, problem.num_kv_heads)
    if problem.section_keys is not None:
        order = np.argsort(sections(problem, segment[chunk], head), kind="stable")
        chunk, head = chunk[order], head[order]
    return chunk, head


def longest_first(cost: Ints, segment: Ints, mean: int, num_heads: int) -> tuple[Ints, Ints]:
    """Repeats chunks for every head and sorts the items by descending cost, up to the tolerance.

    Items of like cost stay in the order (segment, head, rows, keys), so that items assigned at the
    same time mostly share the keys of one head.

    Args:
        cost: (n,) cost of each chunk, ordered by segment, rows, keys.
        segment: (n,) their segments.
        mean: mean load of a CTA.
        num_heads: key/value heads.

    Returns:
        (n * num_heads,) chunk and head of each item.
    """
    if len(cost) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    grade = cost // max(1, mean // TOLERANCE)
    falling = grade.max() - grade
    if falling.max() < 2**16:
        falling = falling.astype(np.uint16)  # NumPy sorts these by radix
    order = np.argsort(falling, kind="stable")
    # Within a run of equal grade and segment, heads are the outer loop.
    falling, segment = falling[order], segment[order]
    opens = np.ones(len(order), bool)
    opens[1:] = (falling[1:] != falling[:-1]) | (segment[1:] != segment[:-1])
    start = np.flatnonzero(opens)
    length = np.diff(start, append=len(order))
    run = np.cumsum(opens) - 1
    place = (np.arange(len(order)) + (num_heads - 1) * start[run])[:, None]
    place = place + np.arange(num_heads) * length[run][:, None]
    chunk = np.empty(place.size, np.int64)
    head = np.empty(place.size, np.int64)
    chunk[place] = order[:, None]
    head[place] = np.arange(num_heads)
    return chunk, head
