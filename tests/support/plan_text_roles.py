"""Plans of two roles as text; the definition of what `role_lists.build` computes.

What it does for one role is in `plan_text_stream_k`.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil, floor

import numpy as np

from support import plan_text
from support.plan_text import Item, query_tiles, work_list
from support.plan_text_stream_k import Line, cut, laid, length, mark_at, ordered, partition
from warploom.scheduler.model.constants import (
    ENDS,
    PER_SHARED_DECODE,
    PER_SHARED_PREFILL,
    PREFILL_SLICES,
    ROUNDS,
    SNAP,
)
from warploom.scheduler.model.layout import MERGE, ROLE_ITEM
from warploom.scheduler.model.problem import Problem, WorkList
from warploom.scheduler.partition.stream_k import fitting_slices


def build(problem: Problem) -> WorkList:
    """Plans one batch.

    1. Share out the CTAs by what either role would take.
    2. Partition decodes for the first of them, as if they were alone; but if there are prefills,
       too, and some are to share, cut most of each line into a part for each of these, and the
       rest into shared parts.
    3. Lay prefills of all heads on one line. If all are short, and none is much longer than an
       equal part, cut it into lists of whole ones, of which each of the CTAs that remain has one
       and the others are shared; each tile of all heads is put before the next if the cache holds
       all keys. Else do so with most of the line; or, if there are too few, cut it into a part for
       each of these CTAs. Cut the rest into shared parts. But of long ones that are half as many
       as CTAs, or fewer, each is cut into as many parts as there are CTAs for it; or all into a
       part for each CTA, if more than an eighth of these had none.
    4. List prefills of each CTA, decodes of each CTA, shared prefills and shared decodes.

    If prefills may be dealt, those alone are planned as if there were one tile; so are long ones
    beside decodes if their price is known, many CTAs have six each or fewer, and heads have
    groups or the line would lack a round. Beside decodes the pieces that level them are shared, or
    else the last of each CTA that has several.
    """
    assert problem.prices is not None
    prefill, decode = problem.by_role()
    for_prefill, for_decode = _share_out(problem, prefill, decode)
    own, shared, merges = _prefills(prefill, for_prefill)
    tiles, is_alone = list(query_tiles(prefill)), not any(query_tiles(decode))
    if tiles and problem.may_deal:
        is_known = problem.prices.may_deal_beside_decodes
        are_few = for_prefill >= 32 and len(tiles) <= 6 * for_prefill
        is_better = problem.group_size >= 4 or _lacks_a_round(prefill, tiles, for_prefill)
        is_long = not _are_short(prefill, tiles, for_prefill)
        if is_alone or (is_known and are_few and is_better and is_long):
            own, shared, merges = _dealt(prefill, for_prefill, is_alone)
    decodes, more, claimed = [], [], 0
    if for_decode:
        decodes, more, claimed = _decodes(problem, decode, for_decode, any(own))
    slots = sum(count for _, count in merges)
    decodes = [[_behind(item, slots, len(merges)) for item in line] for line in decodes]
    decodes, left = decodes[: len(decodes) - claimed], decodes[len(decodes) - claimed :]
    none: list[Line] = [[] for _ in range(problem.num_ctas)]
    first = [*none[: problem.active_ctas - for_prefill], *own]
    roles = [
        work_list(prefill, _filled(first, none), []),
        work_list(decode, _filled(decodes, none), []),
        work_list(prefill, _filled(shared, none * (ROUNDS - 1 + ENDS)), []),
        work_list(decode, _filled(left, none * ENDS), []),
    ]
    found = _joined(problem, roles, [*merges, *((at + slots, n) for at, n in more)])
    counts = len(decodes) if any(decodes) else 0, claimed
    return replace(
        found, num_shared_prefills=len(shared), num_decode_ctas=counts[0],
        num_shared_decodes=counts[1],
    )  # fmt: skip


def _share_out(problem: Problem, prefill: Problem, decode: Problem) -> tuple[int, int]:
    assert problem.prices is not None
    active = problem.active_ctas
    by_role = zip((prefill, decode), problem.prices.units, strict=True)
    times = [length(part, list(query_tiles(part))) * unit for part, unit in by_role]
    if not all(times):
        return (active, 0) if times[0] else (0, active)
    if active == 1:
        return 1, 1
    saturating = min(problem.prices.saturating, active)
    of_memory, of_all = Fraction(times[1], saturating), Fraction(sum(times), active)
    by_memory = ceil(times[0] / of_memory)
    others = active - saturating
    if by_memory < others:  # some are idle
        taken = max(by_memory + (others - by_memory) // 4, others // 2)
    else:
        taken = floor(times[0] / of_all)
    taken = min(max(taken, 1), active - 1)
    return taken, active - taken


def _prefills(problem: Problem, ctas: int) -> tuple[list[Line], list[Line], list[tuple[int, int]]]:
    """Parts of CTAs, shared parts, and merges."""
    heads = [
        ordered([i for i in query_tiles(problem) if i.kv_head == h])
        for h in range(problem.num_kv_heads)
    ]
    line = [item for items in heads for item in items]
    if not line:
        return [[] for _ in range(ctas)], [], []
    assert problem.prices is not None
    cached = problem.prices.cached_keys
    fits = cached is None or _keys(problem, line) <= cached
    if _are_short(problem, line, ctas) and fits:
        line = [item for alike in zip(*heads, strict=True) for item in alike]
    own, first, end, behind = _parts(problem, line, ctas)
    snap, rest = end // (len(first) * SNAP), length(problem, line) - end
    places = [*first, *(end + at for at in _ends(rest, behind))]
    marks = [mark_at(problem, line, at, snap) for at in places]
    work, merges = cut(problem, [line], marks, len(first) + len(behind))
    return _filled(work[:own], [[]] * ctas), work[own:], merges


def _dealt(
    prefill: Problem, ctas: int, is_alone: bool
) -> tuple[list[Line], list[Line], list[tuple[int, int]]]:
    """Whole prefills, with the pieces that level them."""
    assert prefill.prices is not None
    fused = sum(int(num_q) for num_q in prefill.segments["num_q"]) * prefill.group_size
    shares = fused >= 4 * prefill.rows * len(prefill.segments)
    keys = prefill.prices.cached_keys if shares else None
    one = replace(prefill, stream_k=False, section_keys=keys, num_ctas=ctas, active_ctas=ctas)
    work, merges = plan_text.lists(one)
    if is_alone:
        return work, [], merges
    first = [slot for slot, _ in merges]
    pieces = [i for line in work for i in line if i.slot >= 0 and i.slot not in first]
    whole = [[i for i in line if i.slot < 0 or i.slot in first] for line in work]
    pieces.sort(key=lambda item: (-item.visible, item.slot))
    if not pieces:
        pieces = [line.pop() for line in whole if len(line) > 1]
        pieces.sort(key=lambda item: -item.visible)
    return whole, [[piece] for piece in pieces], merges


def _are_short(problem: Problem, line: Line, ctas: int) -> bool:
    """Whether prefills are lists of whole ones."""
    assert problem.prices is not None
    longest, short = max(i.visible for i in line), ceil(problem.prices.shortest_cut / problem.keys)
    late = longest - length(problem, line) // (ctas * problem.cost_model.per_tile)
    return problem.active_ctas > 1 and longest < short and late < ceil(short / 8)


def _parts(problem: Problem, line: Line, ctas: int) -> tuple[int, list[int], int, list[int]]:
    """Parts that CTAs have, where the first parts begin and end, and shares of those behind."""
    assert problem.prices is not None
    total, least = length(problem, line), problem.cost_model.least_slice
    active = problem.active_ctas
    if _are_short(problem, line, ctas):
        each = ceil(len(line) / (ctas + (PREFILL_SLICES - 1) * active))
        begins = [length(problem, line[:i]) for i in range(0, len(line), each)]
        return min(ctas, len(begins)), begins, total, []
    if _is_beyond(problem, line):
        items, lists, _ = _rounds(len(line), ctas, active)
        begins = [length(problem, line[: items * i]) for i in range(lists + 1)]
        tail = min(ctas, (total - begins[-1]) // (7 * least))
        if lists and tail:
            return ctas, begins[:-1], begins[-1], [4] * tail + [2] * tail + [1] * tail
    if 2 * len(line) <= ctas:
        all_parts = max(1, min(ctas, total // least))
        own = fitting_slices(len(line), all_parts)
        own = all_parts if own < all_parts * Fraction(7, 8) else own
        return own, [i * total // own for i in range(own)], total, []
    shared = min(ctas, total // PER_SHARED_PREFILL // least) if active > 1 else 0
    end = total - total // PER_SHARED_PREFILL if shared else total
    own = max(1, min(ctas, end // least))
    return own, [i * end // own for i in range(own)], end, [1] * shared


def _is_beyond(problem: Problem, line: Line) -> bool:
    """Whether more keys are read than the cache holds, by several CTAs."""
    assert problem.prices is not None
    cached = problem.prices.cached_keys
    return cached is not None and problem.active_ctas > 1 and _keys(problem, line) > cached


def _lacks_a_round(problem: Problem, line: Line, ctas: int) -> bool:
    return not (_is_beyond(problem, line) and _rounds(len(line), ctas, problem.active_ctas)[2])


def _keys(problem: Problem, line: Line) -> int:
    """Keys in tiles that the first items of all segments and heads see."""
    first = {(item.kv_head, item.segment): item for item in reversed(line)}
    return sum(item.visible for item in first.values()) * problem.keys


def _rounds(items: int, ctas: int, active: int) -> tuple[int, int, bool]:
    """Items of a list of whole ones, and such lists; whoever gets none finds as much behind.

    And whether no round is left out for that.
    """
    most = items - ceil(max(Fraction(items, PER_SHARED_PREFILL), Fraction(active, 2)))
    if most < ctas:
        return 0, 0, False
    each = ceil(Fraction(most, ctas + (ROUNDS - 1) * active))
    lists = most // each
    rounds = ceil(Fraction(lists, ctas))
    are_all = rounds * ctas * each <= items
    return each, lists if are_all else (rounds - 1) * ctas, are_all


def _ends(rest: int, shares: list[int]) -> list[int]:
    """Where parts of these shares of the rest begin, with the end."""
    whole = max(sum(shares), 1)
    return [sum(shares[:i]) * rest // whole for i in range(len(shares) + 1)]


def _decodes(
    problem: Problem, decode: Problem, ctas: int, has_prefills: bool
) -> tuple[list[Line], list[tuple[int, int]], int]:
    """Parts of CTAs with shared parts behind them, merges, and how many are shared."""
    assert problem.prices is not None
    heads = [[i for i in query_tiles(decode) if i.kv_head == h] for h in range(decode.num_kv_heads)]
    lines, slices = laid([ordered(items) for items in heads], ctas)
    total, model = length(decode, lines[0]), decode.cost_model
    rest = total // PER_SHARED_DECODE
    own, tiles = total - rest, ceil(problem.prices.claim / decode.keys)
    shortest = max(tiles * model.per_tile, 2 * model.grain * model.per_tile)
    shares = [size for size in ([4, 2, 1], [2, 1]) if rest >= sum(size) * slices * shortest]
    if not has_prefills or ctas == 1 or not shares:
        work, merges = partition(decode, ctas)
        return work[: len(lines) * slices], merges, 0
    places = [i * own // slices for i in range(slices)]
    ends = [share for share in shares[0] for _ in range(slices)]
    places += [own + end for end in _ends(rest, ends)]
    marks = [mark_at(decode, lines[0], at, own // (slices * SNAP)) for at in places]
    parts, claimed = len(lines) * slices, len(shares[0])
    return *cut(decode, lines, marks, (1 + claimed) * parts), claimed * parts


def _behind(item: Item, slots: int, merges: int) -> Item:
    if item.slot < 0:
        return item
    return replace(item, slot=item.slot + slots, merge=item.merge + merges)


def _filled(lists: list[Line], none: list[Line]) -> list[Line]:
    return [*lists, *none[len(lists) :]]


def _joined(problem: Problem, parts: list[WorkList], merges: list[tuple[int, int]]) -> WorkList:
    assert problem.prices is not None
    items = np.concatenate([part.items for part in parts]).view(ROLE_ITEM.dtype)
    counts = [len(part.items) for part in parts]
    items["role"] = np.repeat([0, 1, 0, 1], counts)
    prefill, decode = problem.prices.units
    units = prefill, decode, prefill, decode
    loads = [part.loads * unit for part, unit in zip(parts, units, strict=True)]
    lengths = np.concatenate([np.diff(part.cta_indptr) for part in parts])
    indptr = np.append(0, np.cumsum(lengths)).astype(np.int32)
    return WorkList(indptr, items, np.array(merges, MERGE.dtype), np.concatenate(loads))
