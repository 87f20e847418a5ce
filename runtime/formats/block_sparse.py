"""Block-sparse storage: ragged keys, of which each block row of queries lists blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from warploom.dsl.types.formats import BlockSparse as Declared
from warploom.errors import ArgumentError, IndexOutOfRange
from warploom.runtime.formats.base import Drawn, Format, Ints, OracleSegment, Stored
from warploom.runtime.formats.batch import Arguments, Arrays, HostBatch
from warploom.runtime.formats.lists import (
    Int32s,
    as_indptr,
    as_int32,
    block_list,
    indptr,
    one_per_request,
    refuse_lengths,
)
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.layout import SEGMENT


class BlockSparse(Format[Declared]):
    """See `warploom.BlockSparse`."""

    takes = ("kv_indices", "kv_lens")
    by_request = ("kv_lens",)

    def instead(self, name: str) -> str:
        return "give kv_lens"

    def lower(self, qo: Int32s, given: Arguments) -> HostBatch:
        rows, columns = self.declared.block
        q_lens = np.diff(qo)
        block_rows = -(-q_lens // rows)
        kv = indptr(
            given.kv_indptr, "kv_indptr", entries=int(block_rows.sum()) + 1, counted="block rows"
        )
        lengths = _checked_lengths(given.kv_lens, len(q_lens))
        request = np.repeat(np.arange(len(q_lens)), block_rows)
        listed = block_list(given.kv_indices, int(kv[-1]), "BlockSparse counts blocks")
        indices = _sorted_columns(listed, kv, -(-lengths[request] // columns))
        first = np.cumsum(block_rows) - block_rows  # first block row of each request
        row_in_request = (np.arange(len(request)) - first[request]) * rows
        segments = np.zeros(len(request), SEGMENT.dtype)
        segments["batch"] = request
        segments["q_row"] = qo[:-1][request] + row_in_request
        segments["q_idx"] = row_in_request
        segments["num_q"] = np.minimum(rows, q_lens[request] - row_in_request)
        segments["q_len"] = q_lens[request]
        segments["kv_len"] = lengths[request]
        segments["kv_count"] = _keys_listed(indices, kv, lengths[request], columns)
        ends = as_int32(np.cumsum(lengths, dtype=np.int64), "the sum of kv_lens")
        segments["kv_row"] = (ends - lengths)[request]
        segments["index_begin"] = kv[:-1]
        arrays = Arrays(segments, indices, q_lens, lengths.copy())
        return HostBatch(int(qo[-1]), int(lengths.sum()), arrays)

    def most_blocks(self, bounds: Bounds) -> tuple[str, int] | None:
        columns = self.declared.block_kv
        each = -(-bounds.max_kv_len // columns)
        return f"max_segments * ceil(max_kv_len / {columns})", bounds.segments * each

    def kernel_strides(self, block: int, token: int, head: int) -> tuple[int, int, int]:
        return self.declared.block_kv * token, token, head

    def keys_of(self, segment: Any, batch: HostBatch) -> tuple[Ints, tuple[Ints, Ints]]:
        place, size = np.arange(int(segment["kv_count"])), self.declared.block_kv
        block = batch.indices[int(segment["index_begin"]) + place // size].astype(np.int64)
        column = block * size + place % size
        return column, (np.zeros_like(column), column + int(segment["kv_row"]))

    def store(self, drawn: Drawn) -> Stored:
        rows, columns = self.declared.block
        segments: list[list[OracleSegment]] = []
        lists: list[Ints] = []
        for q_len, kv_len in zip(drawn.q_lens, drawn.lengths, strict=True):
            own = []
            for start in range(0, q_len, rows):
                lists.append(np.flatnonzero(drawn.rng.random(-(-kv_len // columns)) < 0.6))
                keys = np.flatnonzero(np.isin(np.arange(kv_len) // columns, lists[-1]))
                own_rows = slice(start, min(start + rows, q_len))
                own.append(OracleSegment(own_rows, keys, keys, kv_len))
            nothing = np.arange(0)
            segments.append(own or [OracleSegment(slice(0, 0), nothing, nothing, kv_len)])
        plan = {
            "kv_indptr": as_indptr([len(row) for row in lists]),
            "kv_indices": np.concatenate([np.zeros(0), *lists]).astype(np.int32),
            "kv_lens": np.array(drawn.lengths, np.int32),
        }
        return Stored(np.concatenate(drawn.k), np.concatenate(drawn.v), plan, segments)


def _checked_lengths(kv_lens: Any, requests: int) -> Int32s:
    lengths = one_per_request(kv_lens, "kv_lens", requests)
    refuse_lengths(lengths < 0, lengths, "kv_lens", "0 or more")
    return lengths


def _keys_listed(indices: Int32s, kv: Int32s, kv_len: Int32s, columns: int) -> Ints:
    """Keys in each block row's list; only its last block can reach past the end of the request."""
    blocks = np.diff(kv).astype(np.int64)  # the last block may end above int32
    last = np.zeros_like(blocks)
    last[blocks > 0] = indices[kv[1:][blocks > 0] - 1]
    over = np.where(blocks > 0, np.maximum((last + 1) * columns - kv_len, 0), 0)
    return blocks * columns - over


def _sorted_columns(indices: Int32s, kv: Int32s, blocks: Int32s) -> Int32s:
    """Columns of each block row, ascending; each must exist, and none may be named twice."""
    row = np.repeat(np.arange(len(kv) - 1), np.diff(kv))
    outside = np.flatnonzero((indices < 0) | (indices >= blocks[row]))
    if outside.size:
        at = int(outside[0])
        raise IndexOutOfRange(
            name="kv_indices",
            index=at,
            value=int(indices[at]),
            last=int(blocks[row[at]]) - 1,
            empty="its request has no keys",
        )
    order = np.lexsort((indices, row))
    ordered = indices[order]
    twice = np.flatnonzero((ordered[1:] == ordered[:-1]) & (row[1:] == row[:-1]))
    if twice.size:
        at = int(order[twice[0] + 1])
        raise ArgumentError(
            name="kv_indices",
            reason=f"block row {int(row[at])} names column {int(indices[at])} twice, "
            "and its keys would count twice",
        )
    return ordered
