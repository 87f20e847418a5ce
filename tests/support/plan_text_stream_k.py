"""The Stream-K partition as text: one boundary and one item at a time.

Slow, and the definition of what `stream_k.build` and the native planner compute.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from support.plan_text import Item, between, cost_of, query_tiles, work_list
from warploom.scheduler.model.constants import PER_IDLE_CTA, SNAP
from warploom.scheduler.model.problem import Problem, WorkList
from warploom.scheduler.partition.stream_k import fitting_slices

Line = list[Item]
Boundary = tuple[int, int]  # item on the line, and its visible key tiles that come before


def build(problem: Problem) -> WorkList:
    """Plans one batch.

    1. Lay the items of each head end to end on a line: the longest, the shortest, the second
       longest, and so on. If heads do not divide the CTAs, lay all heads on one line.
    2. Mark even parts on the line; as many as there are CTAs for each line, or fewer, so that every
       item can have equal parts, or every part as many items.
    3. Move each mark to the nearest end of an item; or only if an end is near, and to a whole key
       tile otherwise. Of these four, take the one whose longest part is the shortest.
    4. Cut where marks lie within items. All lines are cut at the same places.
    """
    work, merges = partition(problem, problem.active_ctas)
    idle: list[Line] = [[] for _ in range(problem.num_ctas - len(work))]
    return work_list(problem, work + idle, merges)


def partition(problem: Problem, ctas: int) -> tuple[list[Line], list[tuple[int, int]]]:
    """Items of each of so many CTAs, and merges."""
    heads = [
        [i for i in query_tiles(problem) if i.kv_head == h] for h in range(problem.num_kv_heads)
    ]
    lines, slices = laid([ordered(items) for items in heads], ctas)
    marks = _best(problem, lines[0], slices)
    return cut(problem, lines, marks, ctas)


def laid(lines: list[Line], ctas: int) -> tuple[list[Line], int]:
    """Lines of heads, or all on one line if they do not divide the CTAs; and CTAs of each."""
    slices, left = divmod(ctas, len(lines))
    if left * PER_IDLE_CTA > ctas or not slices:
        return [[item for line in lines for item in line]], ctas
    return lines, slices


def cut(
    problem: Problem, lines: list[Line], marks: list[Boundary], ctas: int
) -> tuple[list[Line], list[tuple[int, int]]]:
    """Items of each part between two marks, cut where marks lie within them, and merges."""
    work: list[Line] = [[] for _ in range(ctas)]
    merges: list[tuple[int, int]] = []
    for number, line in enumerate(lines):
        for index, item in enumerate(line):
            cuts = sorted({visible for at, visible in marks if at == index and visible})
            slot = sum(count for _, count in merges)
            for part, edges in enumerate(itertools.pairwise([0, *cuts, item.visible])):
                piece = between(problem, item, *edges)
                if cuts:
                    piece = replace(piece, slot=slot + part, merge=len(merges))
                number_of = max(i for i, mark in enumerate(marks[:-1]) if mark <= (index, edges[0]))
                work[number_of * len(lines) + number].append(piece)
            if cuts:
                merges.append((slot, len(cuts) + 1))
    return work, merges


def ordered(items: Line) -> Line:
    by_row = sorted(items, key=lambda item: (item.segment, -item.row_begin))
    if len({item.segment for item in items}) < len(items):
        return by_row
    falling = sorted(by_row, key=lambda item: -item.visible)
    return [falling.pop(0 if i % 2 == 0 else -1) for i in range(len(falling))]


def _best(problem: Problem, line: Line, slices: int) -> list[Boundary]:
    total, count, model = length(problem, line), len(line), problem.cost_model
    if not line:
        return [(0, 0)] * 2
    slices = max(1, min(slices, total // model.least_slice))
    fitting = fitting_slices(count, slices)
    choices = [
        [_mark(problem, line, i, used, cut) for i in range(used + 1)]
        for cut in (False, True)
        for used in (fitting, slices)
    ]
    return min(choices, key=lambda marks: _longest(problem, line, marks))


def _mark(problem: Problem, line: Line, number: int, slices: int, cut: bool) -> Boundary:
    """One even boundary after it has moved."""
    total = length(problem, line)
    return mark_at(problem, line, number * total // slices, total // (slices * SNAP), cut)


def mark_at(problem: Problem, line: Line, at: int, snap: int, cut: bool = True) -> Boundary:
    """A boundary at this place after it has moved."""
    model = problem.cost_model
    index, into = _find(problem, line, at)
    item, cost = line[index], cost_of(problem, line[index])
    nearest = index if 2 * into < cost else index + 1, 0
    is_near = min(into, cost - into) <= snap
    if not cut or is_near or item.visible < 2 * model.grain:
        return nearest
    done = (2 * max(into - model.fixed, 0) + model.per_tile) // (2 * model.per_tile)
    if 2 * done < model.grain:
        return index, 0
    if 2 * (item.visible - done) < model.grain:
        return index + 1, 0
    return index, min(max(done, model.grain), item.visible - model.grain)


def _find(problem: Problem, line: Line, at: int) -> tuple[int, int]:
    """The item that a place on the line falls into, and how far; the last one at the very end."""
    for index, item in enumerate(line[:-1]):
        cost = cost_of(problem, item)
        if at < cost:
            return index, at
        at -= cost
    return len(line) - 1, at


def _longest(problem: Problem, line: Line, marks: list[Boundary]) -> int:
    """Cost of the longest part, with what its partial results cost."""
    model = problem.cost_model
    loads = []
    for (first, before), (last, after) in itertools.pairwise(marks):
        load = 0
        for index in range(first, min(last + 1, len(line))):
            begin = before if index == first else 0
            end = after if index == last else line[index].visible
            whole = (begin, end) == (0, line[index].visible)
            if begin < end or (whole and index < last):
                load += model.fixed + model.per_tile * (end - begin)
                load += 0 if whole else model.partial
        loads.append(load)
    return max(loads)


def length(problem: Problem, line: Line) -> int:
    return sum(cost_of(problem, item) for item in line)
