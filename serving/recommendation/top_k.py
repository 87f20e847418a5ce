"""The best of several sorted lists, without a look at most of them (xLLM, section 4.5).

Each beam offers its candidates in descending order. Once as many are held as are wanted, one that
does not beat the worst of them ends its beam: no later one of that beam does. `heap_top_k` is this
with the paper's min-heap, beam by beam; `sorted_top_k` goes through all beams side by side, a few
candidates at a time, since an interpreter takes longer for a step of the heap than for a row.
"""

from __future__ import annotations

from heapq import heappush, heapreplace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from warploom.errors import ArgumentError, WrongDType, WrongShape
from warploom.recommendation_errors import TooFewCandidates, Unsorted
from warploom.runtime.declaring.declare import checked_count
from warploom.runtime.tensors.tensors import host_array

_FEW = 4096  # candidates that are sorted sooner than a walk over some of them has begun

Ints = npt.NDArray[np.int64]
Scores = npt.NDArray[np.floating[Any]]


class TopK(NamedTuple):
    """The best candidates, best first.

    Attributes:
        scores: [count], of the type of the given ones.
        beams: int64 [count], the row of each.
        ranks: int64 [count], its place in that row.
        seen: candidates whose scores were taken up; the others were passed over.
    """

    scores: Scores
    beams: Ints
    ranks: Ints
    seen: int


def sorted_top_k(scores: Any, count: int, *, assume_sorted: bool = False) -> TopK:
    """The best of the candidates of all beams.

    Among equal scores the earlier beam comes first, then the earlier candidate, as in a stable sort
    of all in descending order. -inf is a score like others, and the last one.

    Args:
        scores: [beams, candidates], floating-point, in descending order within each row.
        count: how many are wanted.
        assume_sorted: leave the order unchecked; the check looks at all candidates, and may take as
            long as the choice. In rows of another order candidates are then missed.

    Raises:
        WrongShape, WrongDType: not two dimensions of floating-point numbers.
        TooFewCandidates: fewer candidates than are wanted.
        Unsorted: a row in another order.
        ArgumentError: no count, or a row that begins with NaN.
    """
    table = _checked(scores, count, assume_sorted)
    flat = table.reshape(-1)
    if len(flat) <= _FEW:
        return _found(table, np.argsort(-flat, kind="stable")[:count], len(flat))
    held, seen = _walk(flat, len(table), count)
    held = np.sort(held)
    return _found(table, held[np.argsort(-flat[held], kind="stable")], seen)


def _walk(flat: Scores, beams: int, count: int) -> tuple[Ints, int]:
    """Places of the best, in any order, and how many candidates were looked at.

    Each round looks at twice as many candidates of each beam as the one before, and only at beams
    whose next one may be among the best held so far.
    """
    width = len(flat) // beams
    starts, held = np.arange(beams) * width, np.empty(0, np.int64)
    rows, at, step, seen = np.arange(beams), 0, -(-count // beams) + 1, 0
    while len(rows) and at < width:
        step = min(step, width - at)
        fresh = starts[rows, None] + np.arange(at, at + step)
        held = np.concatenate((held, fresh.ravel()))
        seen, at, step = seen + fresh.size, at + step, 2 * step
        if len(held) < count:
            continue
        held = _best_of(flat, held, count)
        least = flat[held].min()
        last_place = held[flat[held] == least].max()
        ends = flat[starts[rows] + at - 1]
        rows = rows[(ends > least) | ((ends == least) & (starts[rows] + at < last_place))]
    return held, seen


def heap_top_k(scores: Any, count: int, *, assume_sorted: bool = False) -> TopK:
    """The same by xLLM's algorithm, step by step; arguments and errors are those of `sorted_top_k`.

    The smallest entry of the heap has the least score and, among equals, the last place. What comes
    later with the same score never replaces it, so the first that is no better ends its beam.
    """
    table = _checked(scores, count, assume_sorted)
    heap: list[tuple[float, int]] = []  # (score, -place)
    seen, width = 0, table.shape[1]
    for beam, row in enumerate(table):
        for rank in range(width):
            score, place = float(row[rank]), beam * width + rank
            seen += 1
            if len(heap) < count:
                heappush(heap, (score, -place))
            elif score > heap[0][0]:
                heapreplace(heap, (score, -place))
            else:
                break
    places = -np.array([place for _, place in sorted(heap, reverse=True)], np.int64)
    return _found(table, places, seen)


def _checked(scores: Any, count: int, assume_sorted: bool) -> Scores:
    table = host_array(scores, "scores")
    if table.ndim != 2:
        raise WrongShape(name="scores", got=table.shape, expected="(beams, candidates)")
    if not np.issubdtype(table.dtype, np.floating):
        raise WrongDType(name="scores", got=table.dtype, expected="a floating-point type")
    checked_count("count", count)
    if count > table.size:
        what = f"{table.shape[1]} of each of {table.shape[0]} beams"
        raise TooFewCandidates(name="count", got=count, candidates=table.size, what=what)
    wrong = np.isnan(table[:, 0])
    if wrong.any():
        raise ArgumentError(name="scores", reason=f"row {int(wrong.argmax())} begins with NaN")
    if not assume_sorted:
        rising = table[:, 1:] > table[:, :-1]
        if rising.any():
            beam, rank = (int(i) for i in np.argwhere(rising)[0])
            raise Unsorted(beam=beam, before=table[beam, rank], behind=table[beam, rank + 1])
    return table


def _best_of(flat: Scores, held: Ints, count: int) -> Ints:
    """The best of the held places, in any order; among equal scores the first places."""
    scores = flat[held]
    least = np.partition(scores, len(held) - count)[len(held) - count]
    better, equal = held[scores > least], held[scores == least]
    missing = count - len(better)
    if missing < len(equal):
        equal = np.partition(equal, missing - 1)[:missing]
    return np.concatenate((better, equal))


def _found(table: Scores, places: Ints, seen: int) -> TopK:
    beams, ranks = np.divmod(places, table.shape[1])
    return TopK(table[beams, ranks], beams, ranks, seen)
