"""Tiles of a composed plan: units of requests, the parts that they read, and how they are packed.

A unit is a query tile of one request. A part is a list of keys: a prefix that several requests
share, or the keys of one request alone. A tile holds whole units that read the same part, also of
different requests; so rows of many requests meet the keys of a prefix at once (FlashInfer, 3.1.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from warploom.scheduler.composed.prefixes import PrefixForest
from warploom.scheduler.model.layout import UNIT, Ints, Records
from warploom.scheduler.model.roles import Role, role_of_rows
from warploom.scheduler.model.visibility import Visibility

VisibilityOf = Callable[[Records], Visibility]  # the mask's answers for given segments


@dataclass(frozen=True)
class Units:
    """Query tiles of all requests, in order; shape (n,) each.

    Attributes:
        records: UNIT records.
        request: each unit's request.
        num_q: query rows.
        rows: fused rows.
    """

    records: Records
    request: Ints
    num_q: Ints
    rows: Ints


def cut_units(requests: Records, group_size: int, rows: int) -> Units:
    """Cuts requests at whole query rows; a row whose group fills more than a tile is cut itself.

    Args:
        requests: SEGMENT records, one for each request.
        group_size: query heads of each key/value head.
        rows: rows of a tile.
    """
    queries = max(rows // group_size, 1)  # query rows of a unit
    pieces = -(-group_size // rows)  # units of a query row
    rows_of = requests["num_q"].astype(np.int64)
    count = -(-rows_of // queries) * pieces
    request = np.repeat(np.arange(len(requests)), count)
    place = np.arange(len(request)) - (np.cumsum(count) - count)[request]
    first_q = place // pieces * queries
    first_head = place % pieces * rows
    of = requests[request]
    records = np.zeros(len(request), UNIT.dtype)
    for field in ("batch", "q_len", "kv_len"):
        records[field] = of[field]
    records["q_row"] = of["q_row"] + first_q
    records["q_pos"] = of["q_idx"].astype(np.int64) + first_q + of["kv_len"] - of["q_len"]
    records["first_head"] = first_head
    records["num_heads"] = np.minimum(group_size - first_head, rows)
    num_q = np.minimum(queries, rows_of[request] - first_q)
    return Units(records, request, num_q, num_q * records["num_heads"].astype(np.int64))


@dataclass(frozen=True)
class Parts:
    """Key lists: those of shared prefixes, then one for each request.

    Attributes:
        records: SEGMENT records; a prefix has the batch and lengths of one of its requests.
        before: (parts,) the part with the preceding keys, or -1.
        num_shared: number of prefixes.
    """

    records: Records
    before: Ints
    num_shared: int

    @property
    def levels(self) -> int:
        """Most parts that a request reads."""
        depth = np.zeros(len(self.before) + 1, np.int64)  # the last entry stands for no part, -1
        for part in range(self.num_shared):  # parts stand before those that follow them
            depth[part] = depth[self.before[part]] + 1
        return 1 + int(depth[self.before[self.num_shared :]].max(initial=0))

    @classmethod
    def of(
        cls, requests: Records, forest: PrefixForest, kept: npt.NDArray[np.bool_], page_size: int
    ) -> Parts:
        """Lists of the kept prefixes, and of each request's remaining keys.

        Args:
            requests: SEGMENT records, one for each request.
            forest: prefixes.
            kept: (nodes,) true for prefixes that are parts.
            page_size: tokens of an entry of the block list.
        """
        last = np.full(len(forest) + 1, -1, np.int64)  # last part up to each node, or -1
        end = np.zeros(len(forest) + 1, np.int64)  # end of that part's keys
        before = np.full(len(forest), -1, np.int64)
        begin = np.zeros(len(forest), np.int64)
        number = np.cumsum(kept) - 1
        for node, parent in enumerate(forest.parent.tolist()):
            before[node], begin[node] = last[parent], end[parent]
            last[node] = number[node] if kept[node] else last[parent]
            end[node] = forest.end[node] if kept[node] else end[parent]
        shared, own = requests[forest.first[kept]], requests.copy()
        shared["kv_pos"] = begin[kept]
        shared["kv_count"] = forest.end[kept] - begin[kept]
        own["kv_pos"] = end[forest.leaf]
        own["kv_count"] -= own["kv_pos"]
        records = np.concatenate((shared, own))
        records["index_begin"] += records["kv_pos"] // page_size
        return cls(records, np.concatenate((before[kept], last[forest.leaf])), int(kept.sum()))


@dataclass(frozen=True)
class Pairs:
    """Units and the parts that they read, ordered by part, then unit; shape (n,) each.

    Attributes:
        begin, end: keys of the part's list that some row of the unit may see.
    """

    unit: Ints
    part: Ints
    begin: Ints
    end: Ints


def make_pairs(units: Units, parts: Parts, group_size: int, visibility_of: VisibilityOf) -> Pairs:
    """Which units read which parts, and which of their keys.

    Pairs without a visible key are left out, except the own part of a unit that sees no key at all:
    an item must write the unit's rows.
    """
    unit, part = np.arange(len(units.request)), parts.num_shared + units.request
    found = []
    while len(unit):
        found.append((part, unit))
        shares = parts.before[part] >= 0
        unit, part = unit[shares], parts.before[part[shares]]
    part, unit = np.concatenate([np.zeros((2, 0), np.int64), *found], axis=1)
    order = np.lexsort((unit, part))
    part, unit = part[order], unit[order]
    begin, end = visibility_of(pair_segments(units, parts, unit, part)).kv_bounds(
        np.arange(len(unit)), np.zeros_like(unit), units.num_q[unit] * group_size
    )
    begin = np.maximum(begin, 0)
    end = np.minimum(end, parts.records["kv_count"][part])
    seen = end > begin
    blind = np.bincount(unit, seen, len(units.request)) == 0
    keep = np.flatnonzero(seen | (blind[unit] & (part >= parts.num_shared)))
    return Pairs(
        unit[keep], part[keep], np.where(seen, begin, 0)[keep], np.where(seen, end, 0)[keep]
    )


def pair_segments(units: Units, parts: Parts, unit: Ints, part: Ints) -> Records:
    """SEGMENT records for a mask's analysis: the rows of a unit and the keys of a part.

    Args:
        unit, part: (n,) unit and part of each pair.
    """
    segments, records = parts.records[part], units.records[unit]
    for field in ("batch", "q_row", "q_len", "kv_len"):
        segments[field] = records[field]
    segments["q_idx"] = records["q_pos"] - records["kv_len"] + records["q_len"]
    segments["num_q"] = units.num_q[unit]
    return segments


@dataclass(frozen=True)
class PackedTiles:
    """Query tiles, ordered by part; shape (n,) each. Every key/value head has the same ones.

    Attributes:
        part: the part whose keys the tile reads.
        first_pair, end_pair: range of its units in `Pairs`.
        rows: fused rows.
        kv_begin: first key of the part's list, a multiple of the key tile of the rows' role.
        kv_end: one past the last key; equal to kv_begin if nothing is visible.
    """

    part: Ints
    first_pair: Ints
    end_pair: Ints
    rows: Ints
    kv_begin: Ints
    kv_end: Ints

    def take(self, index: Ints) -> PackedTiles:
        return PackedTiles(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def pack(units: Units, parts: Parts, pairs: Pairs, roles: Sequence[Role]) -> PackedTiles:
    """Packs the units that read a part into tiles, in order, each as full as it gets.

    Units that read a request's own part get a tile each, since no other request reads its keys.

    Args:
        roles: the one with the most rows first; these are the rows of a full tile.
    """
    rows = roles[0].rows
    rows_of = units.rows[pairs.unit]
    place = np.cumsum(rows_of) - rows_of
    opens = np.ones(len(pairs.unit), bool)
    shared = np.searchsorted(pairs.part, np.arange(parts.num_shared + 1))
    for start, stop in zip(shared[:-1].tolist(), shared[1:].tolist(), strict=True):
        opens[start:stop] = False
        while start < stop:
            opens[start] = True
            start = int(np.searchsorted(place + rows_of, place[start] + rows, side="right"))
    first = np.flatnonzero(opens)
    if len(first) == 0:
        return PackedTiles(*np.zeros((6, 0), np.int64))
    begin = np.minimum.reduceat(pairs.begin, first)
    end = np.maximum.reduceat(pairs.end, first)
    filled = np.add.reduceat(rows_of, first)
    begin -= begin % np.array([role.keys for role in roles])[role_of_rows(filled, roles)]
    return PackedTiles(
        pairs.part[first], first, np.append(first[1:], len(pairs.unit)), filled, begin, end
    )
