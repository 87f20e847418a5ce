"""Key ranges and visible tiles for the planner, from the mask's interval analysis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from warploom.dsl.masks.intervals import PARTIAL, SKIP, TileAnalysis
from warploom.dsl.types.ir import Node, walk
from warploom.dsl.types.spec import TracedVariant
from warploom.runtime.formats.batch import Arrays
from warploom.scheduler.model.layout import Ints
from warploom.scheduler.model.visibility import AllVisible, Visibility

_PER_REQUEST = ("batch", "q_len", "kv_len")
_FEW = 1024  # up to this many queries, answering all is faster than finding duplicates


@dataclass(frozen=True)
class Heads:
    """Query heads and key/value heads."""

    num_q: int
    num_kv: int

    @cached_property
    def group_size(self) -> int:
        return self.num_q // self.num_kv


def make_visibility(
    traced: TracedVariant, analysis: TileAnalysis, batch: Arrays, heads: Heads, columns: int = 0
) -> Visibility:
    """The mask's answers for this batch.

    Args:
        traced: the variant.
        analysis: analysis of its mask, with the input values of this plan.
        batch: lengths.
        heads: head counts.
        columns: tokens per block of a block-sparse format, where kv_pos is the column; else 0.
    """
    mask = traced.hooks.get("logits_mask")
    if mask is None:
        return AllVisible(batch.segments)
    if columns:
        return ColumnVisibility(mask, analysis, batch, heads, columns)
    return MaskVisibility(mask, analysis, batch, heads)


class MaskVisibility:
    """Answers for formats in which kv_pos is the index in the list, plus `Segment.kv_pos`.

    Duplicate queries are evaluated once: tiles of requests with the same lengths share answers if
    the mask reads nothing else of the request, as is common in decode batches.
    """

    def __init__(self, mask: Node, analysis: TileAnalysis, batch: Arrays, heads: Heads) -> None:
        read = positions_read(mask)
        self._analysis = analysis
        self._heads = heads
        self._kv_heads = range(heads.num_kv) if "kv_head" in read else range(1)
        segments = batch.segments
        self._fields = {
            name: segments[name].astype(np.int64) for name in segments.dtype.names or ()
        }
        self._by_request = "batch" in read

    def kv_bounds(self, segment: Ints, row_begin: Ints, row_end: Ints) -> tuple[Ints, Ints]:
        one, back = self._distinct(segment, row_begin, row_end)
        segment, row_begin, row_end = one
        begin = np.full(len(segment), np.iinfo(np.int64).max)
        end = np.full(len(segment), np.iinfo(np.int64).min)
        for kv_head in self._kv_heads:
            positions = self._positions(segment, row_begin, row_end, kv_head)
            low, high = self._analysis.kv_bounds(**positions)
            seen = low < high
            begin = np.where(seen, np.minimum(begin, low), begin)
            end = np.where(seen, np.maximum(end, high), end)
        begin, end = self._to_list(segment, begin, end)
        return begin[back], end[back]

    def visible_tiles(
        self,
        segment: Ints,
        row_begin: Ints,
        row_end: Ints,
        kv_begin: Ints,
        kv_end: Ints,
        keys: int,
    ) -> Ints:
        one, back = self._distinct(segment, row_begin, row_end, kv_begin, kv_end)
        segment, row_begin, row_end, kv_begin, kv_end = one
        count = np.zeros(len(segment), np.int64)
        # Ranges of whole tiles: a range that is all visible or all hidden is settled, others are
        # halved. A range's class holds for its parts, so the sum equals that of the single tiles.
        owner = np.flatnonzero(kv_end > kv_begin)
        low = kv_begin[owner] // keys
        high = -(-kv_end[owner] // keys)
        while len(owner):
            last = np.minimum(high * keys, kv_end[owner])
            rows = (segment[owner], row_begin[owner], row_end[owner])
            found = self.classify(*rows, low * keys, last)
            single = high - low == 1
            settled = single | (found != PARTIAL)
            np.add.at(count, owner[settled], np.where(found != SKIP, high - low, 0)[settled])
            owner, low, high = owner[~settled], low[~settled], high[~settled]
            middle = (low + high) // 2
            owner = np.concatenate((owner, owner))
            low, high = np.concatenate((low, middle)), np.concatenate((middle, high))
        return count[back]

    def classify(
        self, segment: Ints, row_begin: Ints, row_end: Ints, kv_begin: Ints, kv_end: Ints
    ) -> npt.NDArray[np.int8]:
        """Class of each range of the list, for all heads together."""
        shift = self._fields["kv_pos"][segment]
        return self._class_of(segment, row_begin, row_end, (kv_begin + shift, kv_end + shift))

    def _class_of(
        self, segment: Ints, row_begin: Ints, row_end: Ints, kv_pos: tuple[Ints, Ints]
    ) -> npt.NDArray[np.int8]:
        """One class for all key/value heads: their common class, else PARTIAL."""
        classes = np.stack(
            [
                self._analysis.classify(
                    **self._positions(segment, row_begin, row_end, kv_head), kv_pos=kv_pos
                )
                for kv_head in self._kv_heads
            ]
        )
        same = (classes == classes[0]).all(axis=0)
        return np.where(same, classes[0], PARTIAL).astype(np.int8)

    def _positions(
        self, segment: Ints, row_begin: Ints, row_end: Ints, kv_head: int
    ) -> dict[str, Any]:
        group = self._heads.group_size
        at = {name: values[segment] for name, values in self._fields.items()}
        first = at["q_idx"] + at["kv_len"] - at["q_len"]
        if len(self._kv_heads) > 1:
            heads = (kv_head * group, (kv_head + 1) * group)
        else:
            heads = (0, self._heads.num_q)
        return {
            **{name: at[name] for name in _PER_REQUEST},
            "kv_head": np.int64(kv_head),
            "num_q_heads": np.int64(self._heads.num_q),
            "num_kv_heads": np.int64(self._heads.num_kv),
            "q_pos": (first + row_begin // group, first + (row_end - 1) // group + 1),
            "q_head": heads,
        }

    def _to_list(self, segment: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Converts kv_pos to indices into the segment's list."""
        shift = self._fields["kv_pos"][segment]
        limit = self._fields["kv_count"][segment]
        seen = begin < end
        begin = np.where(seen, np.clip(begin - shift, 0, limit), 0)
        return begin, np.where(seen, np.clip(end - shift, 0, limit), 0)

    @cached_property
    def _same(self) -> Ints:
        """For each segment, the first segment that is equal to it for the mask."""
        names = ["q_idx", "q_len", "kv_len", "kv_count", "kv_pos", *["batch"] * self._by_request]
        first, back = _first_of_likes([self._fields[name] for name in names])
        return first[back]

    def _distinct(self, segment: Ints, *rest: Ints) -> tuple[tuple[Ints, ...], Ints]:
        """Distinct queries, and for each given query the index of its equal among them."""
        if len(segment) <= _FEW:
            return (segment, *rest), np.arange(len(segment))
        columns = (self._same[segment], *rest)
        first, back = _first_of_likes(columns)
        return tuple(column[first] for column in columns), back


class ColumnVisibility(MaskVisibility):
    """Answers for block-sparse rows: kv_pos is the column, and columns of a block row ascend.

    A range of the list is a set of columns; it is classified by the interval around them.
    """

    def __init__(
        self, mask: Node, analysis: TileAnalysis, batch: Arrays, heads: Heads, columns: int
    ) -> None:
        super().__init__(mask, analysis, batch, heads)
        self._columns = columns
        self._indices = batch.indices.astype(np.int64)
        lengths = -(-self._fields["kv_count"] // columns)
        # Block b of segment s is s * width + b, so that one sorted array holds all the lists.
        self._width = int(batch.indices.max(initial=0)) + 2
        self._codes = np.repeat(np.arange(len(lengths)) * self._width, lengths) + self._indices
        self.__dict__["_same"] = np.arange(len(batch.segments))  # lists differ, if not lengths

    def _column(self, segment: Ints, place: Ints) -> Ints:
        block = self._fields["index_begin"][segment] + place // self._columns
        column: Ints = self._indices[block] * self._columns + place % self._columns
        return column

    def classify(
        self, segment: Ints, row_begin: Ints, row_end: Ints, kv_begin: Ints, kv_end: Ints
    ) -> npt.NDArray[np.int8]:
        kv_pos = (self._column(segment, kv_begin), self._column(segment, kv_end - 1) + 1)
        return self._class_of(segment, row_begin, row_end, kv_pos)

    def _to_list(self, segment: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Range of the list whose blocks hold columns in [begin, end)."""
        first = np.clip(begin // self._columns, 0, self._width - 1)
        last = np.clip((end - 1) // self._columns, 0, self._width - 1)
        shift = segment * self._width
        low = np.searchsorted(self._codes, shift + first)
        high = np.maximum(low, np.searchsorted(self._codes, shift + last, side="right"))
        places = np.stack((low, high)) - self._fields["index_begin"][segment]
        limit = self._fields["kv_count"][segment]
        low, high = np.where(begin < end, np.minimum(places * self._columns, limit), 0)
        return low, high


@lru_cache(maxsize=256)
def positions_read(mask: Node) -> frozenset[str]:
    """Names of the positions that a mask depends on."""
    return frozenset(str(found.attr) for found in walk(mask) if found.op == "var")


def _first_of_likes(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """First row of each distinct kind in a table, and for each row the number of its kind."""
    code = np.zeros(len(columns[0]), np.int64)
    size = 1
    for column in columns:  # all values are at least 0
        width = int(column.max(initial=0)) + 1
        if size * width >= 2**62:
            code = np.unique(code, return_inverse=True)[1].reshape(-1)
            size = len(code)
        code, size = code * width + column, size * width
    _, first, back = np.unique(code, return_index=True, return_inverse=True)
    return first, back.reshape(-1)
