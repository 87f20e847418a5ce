"""Tensors into L2, on the current stream or beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch

from warploom import forks
from warploom.dsl.values.stand_ins import unseen
from warploom.errors import ArgumentError, ForbiddenUnderCapture, WrongDevice
from warploom.prefetch_errors import BudgetTooSmall
from warploom.runtime.devices.device import cuda_facts, resolve_device
from warploom.runtime.devices.graph import is_capturing
from warploom.runtime.devices.graph_hold import KeptForGraphs
from warploom.runtime.launching.prefetch import (
    LINE,
    SMS,
    SpanTable,
    checked_budget,
    cut,
    prefetcher,
)
from warploom.runtime.tensors.dense import dense_bytes
from warploom.runtime.tensors.tensors import as_torch
from warploom.serving.prefetch.checks import checked_keep
from warploom.serving.prefetch.safe_budget import SafeBudget

_MOST_TABLES = 256  # kept for calls to come; those that graphs read do not count
_REMEDY = "Call it once before the capture, with these tensors and this budget."


@unseen
def prefetch(tensors: Any, max_bytes: int, *, sms: int = SMS, keep: bool | None = None) -> int:
    """Bring tensors into L2, on the caller's current stream, without waiting for them.

    It changes no result. Enqueue it beside what the reader of the tensors waits for: behind a
    collective that runs on a stream of its own, or in `beside`. A CUDA graph that holds it asks for
    the same addresses at each replay, so the tensors must outlive the graph. On the CPU it fetches
    into the caches of the calling core.

    Args:
        tensors: one, or several in the order in which they will be read. Their elements must fill
            a block of memory, in any order of axes.
        max_bytes: of all of them; the last is cut off there.
        sms: CTAs that ask, each on an SM. The collective has the others.
        keep: mark the lines as the last to be evicted. None: if one of those tensors is larger than
            half of the device's L2, so that its reader drives out what it reads last.

    Returns:
        Bytes that are asked for.

    Raises:
        ArgumentError: no tensors, more CTAs than the device has SMs, or a `keep` that is none.
        BadBudget, BudgetTooSmall: `max_bytes` is no number of bytes, or below a line of 128.
        HasGaps: memory of others lies between a tensor's elements.
        WrongDevice: tensors on several devices.
        ForbiddenUnderCapture: tensors that are new, while a graph is captured.
        UnsupportedSpec: tensors that are neither on a CUDA device nor on the CPU.
    """
    checked_keep(keep)
    given = _given(tensors)
    device = resolve_device(given[0].device)
    for i, tensor in enumerate(given):
        if tensor.device != device:
            raise WrongDevice(name=f"tensors[{i}]", got=str(tensor.device), expected=str(device))
    most = checked_budget(max_bytes)
    if most < LINE:
        raise BudgetTooSmall(got=most, what="a line of L2", needed=LINE)
    sizes = tuple(dense_bytes(x, f"tensors[{i}]") for i, x in enumerate(given))
    if keep is None:
        keep = _largest(sizes, most) > _kept(device)
    kernel = prefetcher(device, sms, keep)
    kernel.launch(_table(device, tuple(x.data_ptr() for x in given), sizes, most))
    return min(most, sum(sizes))


def _largest(sizes: Sequence[int], most: int) -> int:
    """Bytes of the largest tensor that a budget reaches."""
    before = accumulate(sizes, initial=0)
    return max(size for size, begin in zip(sizes, before, strict=False) if begin < most)


def _kept(device: torch.device) -> float:
    """Bytes that L2 keeps until they are read, half of it; a CPU's cores are not asked."""
    return cuda_facts(device.index).l2_bytes / 2 if device.type == "cuda" else math.inf


@unseen
def _given(tensors: Any, name: str = "tensors") -> list[torch.Tensor]:
    """One or several, as torch's; raises ArgumentError if there are none."""
    several = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    if not several:
        raise ArgumentError(name=name, reason="is empty; give what will be read next")
    return [as_torch(x, f"{name}[{i}]", shared=True) for i, x in enumerate(several)]


class _Tables:
    """Tables of tensors that were prefetched before, the last ones and those that graphs read."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._known: dict[tuple[object, ...], SpanTable] = {}  # the last used at the end
        self._of_graphs = KeptForGraphs[SpanTable]()

    def get(
        self, key: tuple[object, ...], device: torch.device, is_captured: bool
    ) -> SpanTable | None:
        with self._lock:
            found = self._known.pop(key, None)
            if found is not None:
                self._known[key] = found
                if is_captured:
                    self._of_graphs.keep(found, device)
            return found

    def put(self, key: tuple[object, ...], table: SpanTable) -> None:
        with self._lock:
            self._known[key] = table
            if len(self._known) <= _MOST_TABLES:
                return
            self._of_graphs.drop_released()
            idle = [key for key, table in self._known.items() if table not in self._of_graphs]
            for oldest in idle[: max(0, len(idle) - _MOST_TABLES)]:
                del self._known[oldest]


_tables = _Tables()


def _table(
    device: torch.device, addresses: tuple[int, ...], sizes: tuple[int, ...], most: int
) -> SpanTable:
    """The spans of tensors on the device, written at their first prefetch.

    One that a launch may still read is not freed under it: its memory is torch's, which knows the
    streams that read it.
    """
    key, captured = (device, addresses, sizes, most), is_capturing(device)
    found = _tables.get(key, device, captured)
    if found is not None:
        return found
    if captured:
        raise ForbiddenUnderCapture(what="prefetch() met new tensors", remedy=_REMEDY)
    offsets, lengths = np.array(addresses, np.int64), np.array(sizes, np.int64)
    records = cut(offsets, lengths, np.zeros_like(offsets), most)
    table = SpanTable(device, len(records))
    table.write(records)
    _tables.put(key, table)
    return table


class Pages(Protocol):
    """What prefetches the pages of a plan: a wrapper."""

    def prefetch(self, kv: Any, max_bytes: int, *, sms: int = SMS) -> int: ...


@contextmanager
def beside(
    tensors: Any, max_bytes: int | SafeBudget, *, sms: int | None = None, keep: bool | None = None
) -> Iterator[int]:
    """Bring tensors into L2 on a side stream while the block's work is enqueued.

    For collectives on the current stream, as custom all-reduces are:

        with beside([layer.gate_up, layer.down], SafeBudget(H200_OVERLAP, 20e-6)):
            all_reduce(x)

    What follows the block waits for the kernel that asks, and not for the memory. A CUDA graph may
    hold it.

    Args:
        tensors, keep: of `prefetch`.
        max_bytes: of `prefetch`, or what chooses them from the duration of the block's work.
        sms: CTAs that ask. None: 8, or those that are chosen with the bytes.

    Returns:
        The bytes asked for, as the block's value. They are 0, and there is no side stream, where a
        SafeBudget finds that a prefetch might lose.

    Raises:
        ArgumentError: the SafeBudget's `seconds` is a function, which would be asked about bytes of
            a collective that is not known here.
        and what `prefetch` raises.
    """
    checked_keep(keep)
    given = _given(tensors)
    if isinstance(max_bytes, SafeBudget):
        size = sum(dense_bytes(x, f"tensors[{i}]") for i, x in enumerate(given))
        most, chosen = max_bytes.with_sms(sms).best(size)
        if not most:
            yield 0
            return
    else:
        most, chosen = max_bytes, SMS if sms is None else sms
    with _aside(given[0].device, partial(prefetch, given, most, sms=chosen, keep=keep)) as asked:
        yield asked


@contextmanager
def beside_pages(wrapper: Pages, kv: Any, max_bytes: int, *, sms: int = SMS) -> Iterator[int]:
    """Bring pages that a wrapper's next run will read into L2, as `beside` does tensors.

    Arguments and errors are those of `AttentionWrapper.prefetch`. `SafeBudget.best` says how many
    bytes, of those that the run reads.
    """
    given = _given(kv, "kv")
    kv = given if isinstance(kv, (list, tuple)) else given[0]
    with _aside(given[0].device, partial(wrapper.prefetch, kv, max_bytes, sms=sms)) as asked:
        yield asked


@contextmanager
def _aside(device: torch.device, call: Callable[[], int]) -> Iterator[int]:
    """A call on the side stream of a device, behind what the current stream has so far."""
    if device.type != "cuda":
        yield call()
        return
    current, side = torch.cuda.current_stream(device), side_stream(device)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            asked = call()
        yield asked
    finally:
        current.wait_stream(side)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device for prefetches."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
