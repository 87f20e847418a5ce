"""Index arrays of plans, checked, and the segments that most formats make of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from warploom.errors import BadIndptr, BadLength, WrongShape
from warploom.runtime.tensors.tensors import host_int32
from warploom.scheduler.model.bounds import INT32_MAX
from warploom.scheduler.model.layout import SEGMENT, Records

Int32s = npt.NDArray[np.int32]
NO_INDICES: Int32s = np.empty(0, np.int32)


def indptr(value: Any, name: str, entries: int | None = None, counted: str = "requests") -> Int32s:
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


def block_list(value: Any, needed: int, counts: str) -> Int32s:
    """The entries of `kv_indices` that a plan reads.

    Args:
        value: what was given.
        needed: entries of it, kv_indptr[-1].
        counts: whose kv_indptr counts what, for messages: "a Paged cache counts pages".
    """
    indices = host_int32(value, "kv_indices")
    if len(indices) < needed:
        raise WrongShape(
            name="kv_indices",
            got=tuple(indices.shape),
            expected=f"at least {needed} entries, which is kv_indptr[-1]; kv_indptr of {counts}, "
            "not tokens",
        )
    return np.array(indices[:needed])  # a copy: the caller may write to its own before a run


def segments_of(qo: Int32s, kv_lens: Int32s) -> Records:
    """One segment per request; formats fill in what differs."""
    segments = np.zeros(len(qo) - 1, SEGMENT.dtype)
    segments["batch"] = np.arange(len(segments))
    segments["q_row"] = qo[:-1]
    segments["num_q"] = segments["q_len"] = np.diff(qo)
    segments["kv_len"] = segments["kv_count"] = kv_lens
    return segments


def refuse_lengths(
    wrong: npt.NDArray[np.bool_], lengths: npt.NDArray[Any], name: str, expected: str
) -> None:
    """Raise BadLength for the first of the lengths that are wrong, if any is."""
    if wrong.any():
        at = int(wrong.argmax())
        raise BadLength(name=name, index=at, value=int(lengths[at]), expected=expected)


def one_per_request(value: Any, name: str, requests: int) -> Int32s:
    """Lengths of the requests, as the caller gave them."""
    lengths = host_int32(value, name)
    if len(lengths) != requests:
        expected = f"({requests},), one per request"
        raise WrongShape(name=name, got=tuple(lengths.shape), expected=expected)
    return lengths


def as_int32(lengths: npt.NDArray[np.int64], name: str) -> Int32s:
    """Lengths in the type that kernels count in."""
    refuse_lengths(lengths > INT32_MAX, lengths, name, f"at most {INT32_MAX}")
    return lengths.astype(np.int32)


def as_indptr(lengths: Any) -> Int32s:
    """Where each begins, and the last ends, if they lie one behind the other."""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
