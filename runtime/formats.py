"""Plan arguments of every KV format, checked and lowered to segments and one list of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from warploom.dsl.extents import MAX_LENGTH
from warploom.dsl.formats import BlockSparse, Composed, Dense, KVFormat, Paged, Ragged
from warploom.errors import ArgumentError, BadIndptr, BadLength, IndexOutOfRange, WrongShape
from warploom.runtime.batch import Batch as Batch
from warploom.runtime.tensors import host_int32
from warploom.scheduler.layout import SEGMENT

_NO_INDICES = np.empty(0, np.int32)
_INT32_MAX = np.iinfo(np.int32).max


def make_batch(
    kv_format: KVFormat,
    qo_indptr: Any,
    kv_indptr: Any,
    kv_indices: Any = None,
    last_page_len: Any = None,
    kv_lens: Any = None,
    *,
    rows_name: str = "qo_indptr",
) -> Batch:
    """Check the plan arguments of a format and lower them.

    Args:
        kv_format: the format that the wrapper was declared for.
        qo_indptr: int32 [requests + 1], where each request's query rows begin.
        kv_indptr: int32; dense and ragged: [requests + 1] in tokens; paged: [requests + 1] in
            pages; block-sparse: [block rows of all requests + 1] in blocks.
        kv_indices: int32, pages or column blocks; indexed formats only.
        last_page_len: int32 [requests], tokens in each request's last page; paged only.
        kv_lens: int32 [requests], keys of each request; block-sparse only.
        rows_name: what the caller calls `qo_indptr`, for messages.

    Raises:
        BadIndptr, BadLength, IndexOutOfRange, WrongShape, WrongDType: see `warploom.errors`.
        ArgumentError: an argument that this format does not take, or lacks.
    """
    given = {"kv_indices": kv_indices, "last_page_len": last_page_len, "kv_lens": kv_lens}
    takes: dict[type[KVFormat], tuple[str, ...]] = {
        Dense: (),
        Ragged: (),
        Paged: ("kv_indices", "last_page_len"),
        Composed: ("kv_indices", "last_page_len"),
        BlockSparse: ("kv_indices", "kv_lens"),
    }
    kind = type(kv_format).__name__
    for name, value in given.items():
        if value is not None and name not in takes[type(kv_format)]:
            hint = _instead(kv_format, name)
            raise ArgumentError(name=name, reason=f"the {kind} format does not take it; {hint}")
        if value is None and name in takes[type(kv_format)]:
            order = f": ({rows_name}, kv_indptr, kv_indices, last_page_len)"
            hint = order if name == "last_page_len" else ""
            raise ArgumentError(name=name, reason=f"the {kind} format needs it{hint}")
    batch = _batch(kv_format, qo_indptr, kv_indptr, kv_indices, last_page_len, kv_lens, rows_name)
    for name, lengths in (("q_len", batch.q_lens), ("kv_len", batch.kv_lens)):
        over = np.flatnonzero(lengths > MAX_LENGTH)
        if over.size:
            at, most = int(over[0]), f"at most {MAX_LENGTH}"
            raise BadLength(name=name, index=at, value=int(lengths[at]), expected=most)
    if batch.total_q_rows > MAX_LENGTH:
        rows, expected = batch.total_q_rows, f"at most {MAX_LENGTH} query rows in all"
        raise BadLength(name=rows_name, index=len(batch.q_lens), value=rows, expected=expected)
    return batch


def _batch(
    kv_format: KVFormat,
    qo_indptr: Any,
    kv_indptr: Any,
    kv_indices: Any,
    last_page_len: Any,
    kv_lens: Any,
    rows_name: str,
) -> Batch:
    qo = indptr(qo_indptr, rows_name)
    if isinstance(kv_format, BlockSparse):
        return _block_sparse(qo, kv_indptr, kv_indices, kv_lens, kv_format.block)
    kv = indptr(kv_indptr, "kv_indptr", entries=len(qo))
    if isinstance(kv_format, Paged):
        return _paged(qo, kv, kv_indices, last_page_len, kv_format.page_size)
    return _dense(qo, kv, kv_format.shared) if isinstance(kv_format, Dense) else _ragged(qo, kv)


def _instead(kv_format: KVFormat, name: str) -> str:
    """What to give to a format that does not take this argument."""
    if isinstance(kv_format, BlockSparse):
        return "give kv_lens"
    if isinstance(kv_format, (Paged, Composed)):
        return "give last_page_len"
    if name == "kv_lens":
        return "kv_indptr tells the keys of each request"
    return "pages need kv_format=warploom.Paged(page_size)"


def indptr(
    value: Any, name: str, entries: int | None = None, counted: str = "requests"
) -> np.ndarray:
    """Check an index pointer: starts at 0, never decreases, has the wanted number of entries."""
    array = host_int32(value, name)
    expected = f"one entry more than there are {counted}"
    if entries is not None:
        expected = f"{entries} entries, {expected}"
    reason = None
    if len(array) == 0:
        reason = "is empty"
    elif entries is not None and len(array) != entries:
        reason = f"has {len(array)} entries"
    elif array[0] != 0:
        reason = f"starts with {array[0]}"
    elif (falls := np.flatnonzero(array[1:] < array[:-1])).size:
        at = int(falls[0])
        reason = f"decreases at index {at + 1}, from {array[at]} to {array[at + 1]}"
    if reason is not None:
        raise BadIndptr(name=name, reason=reason, expected=expected)
    return array


def segments_of(qo: np.ndarray, kv_lens: np.ndarray) -> np.ndarray:
    """One segment per request; formats fill in what differs."""
    segments = np.zeros(len(qo) - 1, SEGMENT.dtype)
    segments["batch"] = np.arange(len(segments))
    segments["q_row"] = qo[:-1]
    segments["num_q"] = segments["q_len"] = np.diff(qo)
    segments["kv_len"] = segments["kv_count"] = kv_lens
    return segments


def _dense(qo: np.ndarray, kv: np.ndarray, shared: bool) -> Batch:
    q_lens, kv_lens = np.diff(qo), np.diff(kv)
    rows = int(q_lens.max(initial=0))
    uneven = np.flatnonzero(q_lens != rows)
    if uneven.size:
        at = int(uneven[0])
        raise BadLength(
            name="q_len",
            index=at,
            value=int(q_lens[at]),
            expected=f"{rows}, since dense queries are one [batch, row, head, dim] tensor",
        )
    segments = segments_of(qo, kv_lens)
    segments["q_row"] = 0
    segments["kv_block"] = 0 if shared else segments["batch"]
    return Batch(segments, _NO_INDICES, q_lens, kv_lens, rows, int(kv_lens.max(initial=0)))


def _ragged(qo: np.ndarray, kv: np.ndarray) -> Batch:
    segments = segments_of(qo, np.diff(kv))
    segments["kv_row"] = kv[:-1]
    return Batch(segments, _NO_INDICES, np.diff(qo), np.diff(kv), int(qo[-1]), int(kv[-1]))


def _int32(lengths: np.ndarray, name: str) -> np.ndarray:
    """Lengths in the type that kernels count in."""
    over = np.flatnonzero(lengths > _INT32_MAX)
    if over.size:
        at = int(over[0])
        raise BadLength(
            name=name, index=at, value=int(lengths[at]), expected=f"at most {_INT32_MAX}"
        )
    return lengths.astype(np.int32)


def _block_list(value: Any, needed: int) -> np.ndarray:
    indices = host_int32(value, "kv_indices")
    if len(indices) < needed:
        raise WrongShape(
            name="kv_indices",
            got=tuple(indices.shape),
            expected=f"at least {needed} entries, which is kv_indptr[-1]",
        )
    return np.array(indices[:needed])  # a copy: the caller may write to its own before a run


def _paged(
    qo: np.ndarray, kv: np.ndarray, kv_indices: Any, last_page_len: Any, page_size: int
) -> Batch:
    indices = _block_list(kv_indices, int(kv[-1]))
    negative = np.flatnonzero(indices < 0)
    if negative.size:
        at = int(negative[0])
        raise IndexOutOfRange(
            name="kv_indices", index=at, value=int(indices[at]), last="the last page"
        )
    pages = np.diff(kv)
    last = host_int32(last_page_len, "last_page_len")
    if len(last) != len(pages):
        raise WrongShape(
            name="last_page_len",
            got=tuple(last.shape),
            expected=f"({len(pages)},), one per request",
        )
    wrong = np.flatnonzero((pages > 0) & ((last < 1) | (last > page_size)))
    if wrong.size:
        at = int(wrong[0])
        raise BadLength(
            name="last_page_len", index=at, value=int(last[at]), expected=f"1 to {page_size}"
        )
    full = (pages.astype(np.int64) - 1) * page_size
    kv_lens = _int32(np.where(pages > 0, full + last, 0), "kv_len")
    segments = segments_of(qo, kv_lens)
    segments["index_begin"] = kv[:-1]
    return Batch(
        segments, indices, np.diff(qo), kv_lens, int(qo[-1]), int(indices.max(initial=-1)) + 1
    )


def _block_sparse(
    qo: np.ndarray, kv_indptr: Any, kv_indices: Any, kv_lens: Any, block: tuple[int, int]
) -> Batch:
    rows, columns = block
    q_lens = np.diff(qo)
    block_rows = -(-q_lens // rows)
    kv = indptr(kv_indptr, "kv_indptr", entries=int(block_rows.sum()) + 1, counted="block rows")
    lengths = host_int32(kv_lens, "kv_lens")
    if len(lengths) != len(q_lens):
        raise WrongShape(
            name="kv_lens", got=tuple(lengths.shape), expected=f"({len(q_lens)},), one per request"
        )
    if (lengths < 0).any():
        at = int(np.flatnonzero(lengths < 0)[0])
        raise BadLength(name="kv_lens", index=at, value=int(lengths[at]), expected="0 or more")
    request = np.repeat(np.arange(len(q_lens)), block_rows)
    indices = _sorted_columns(
        _block_list(kv_indices, int(kv[-1])), kv, -(-lengths[request] // columns)
    )
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
    ends = _int32(np.cumsum(lengths, dtype=np.int64), "the sum of kv_lens")
    segments["kv_row"] = (ends - lengths)[request]
    segments["index_begin"] = kv[:-1]
    return Batch(segments, indices, q_lens, lengths.copy(), int(qo[-1]), int(lengths.sum()))


def _keys_listed(
    indices: np.ndarray, kv: np.ndarray, kv_len: np.ndarray, columns: int
) -> np.ndarray:
    """Keys in each block row's list; only its last block can reach past the end of the request."""
    blocks = np.diff(kv).astype(np.int64)  # the last block may end above int32
    last = np.zeros_like(blocks)
    last[blocks > 0] = indices[kv[1:][blocks > 0] - 1]
    over = np.where(blocks > 0, np.maximum((last + 1) * columns - kv_len, 0), 0)
    return blocks * columns - over


def _sorted_columns(indices: np.ndarray, kv: np.ndarray, blocks: np.ndarray) -> np.ndarray:
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
