"""Launches of the prefetch kernel, which brings memory into the last-level cache, and its table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from warploom import forks
from warploom.codegen.abi import Packer
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.prefetch import SOURCES, SPAN, PrefetchSpec
from warploom.errors import ArgumentError
from warploom.prefetch_errors import BadBudget, BudgetNotChosen
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.devices.graph import is_capturing
from warploom.runtime.devices.loaded import load
from warploom.runtime.devices.params import Block
from warploom.runtime.devices.upload import Upload
from warploom.scheduler.model.layout import Ints, Records

LINE = 128  # bytes of an L2 line, the smallest useful budget
SMS = 8  # CTAs of a prefetch, one per SM
_MOST = 2**63 - 1  # bytes; the kernel's table counts in int64
_PIECE = 16 * 1024  # bytes of one prefetch instruction; small, so that CTAs share large tensors
_INTS = SPAN.itemsize // 4


def cut(offsets: Ints, sizes: Ints, sources: Ints, most: int) -> Records:
    """Records of the kernel's table: spans in order, cut into pieces, `most` bytes of them.

    Args:
        offsets, sizes: int64 [spans], in bytes.
        sources: int64 [spans], which source each offset counts from.
        most: bytes of all records together, at most.
    """
    before = np.cumsum(sizes) - sizes
    kept = np.clip(most - before, 0, sizes)
    pieces = -(-kept // _PIECE)
    span = np.repeat(np.arange(len(kept)), pieces)
    at = (np.arange(len(span)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * _PIECE
    records: Records = np.zeros(len(span), SPAN)
    records["offset"] = offsets[span] + at
    records["bytes"] = np.minimum(kept[span] - at, _PIECE)
    records["source"] = sources[span]
    return records


def most_records(spans: int, size: int) -> int:
    """Number of records that `spans` spans of `size` bytes are cut into."""
    return spans * -(-size // _PIECE)


def checked_budget(max_bytes: object) -> int:
    """The budget in bytes. It has no default: the safe size depends on the collective.

    Raises:
        BadBudget: the budget is no integer, or negative.
        BudgetNotChosen: the budget is a SafeBudget, where bytes are needed.
    """
    if hasattr(max_bytes, "with_sms"):
        raise BudgetNotChosen(got=type(max_bytes).__name__)
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
        raise BadBudget(got=repr(max_bytes), least=LINE)
    return min(max_bytes, _MOST)


class SpanTable:
    """The kernel's table, at a fixed address: a captured launch reads its current contents.

    A read on any stream waits for the last write, and a write waits for all reads. Captured reads
    wait for nothing: the caller must order their replays.

    Attributes:
        most: records that the table can hold.
        address: address of the table.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self.most = most
        self._memory = torch.empty((1 + most) * _INTS, dtype=torch.int32, device=device)
        self._upload = Upload(device)
        self.address = self._memory.data_ptr()
        self._owner = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._written: torch.Event | None = None
        self._reads: dict[int, Any] = {}  # stream -> event of its last read since that write

    def write(self, records: Records) -> None:
        """Enqueue a write of new contents on the current stream, after all reads of the old."""
        stream = None
        if self._memory.is_cuda:
            stream = torch.cuda.current_stream(self._memory.device)
            self._await(stream, *self._reads.values())
        used = (1 + len(records)) * _INTS
        table = self._upload.stage(self._memory).buffer[:used].numpy().view(SPAN)
        table[0] = len(records), 0, 0
        table[1:] = records
        self._upload.send(used)
        if stream is not None:
            self._written, self._reads = stream.record_event(), {}

    @contextmanager
    def read_by(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Order the reads of the table that the `with` block enqueues on a stream."""
        if is_capturing(self._memory.device):
            yield
            return
        self._await(stream)
        yield
        self._reads[stream.cuda_stream] = stream.record_event(self._reads.get(stream.cuda_stream))

    def _await(self, stream: torch.cuda.Stream, *events: torch.Event) -> None:
        """Let a stream that will use the table wait for the last write and for events.

        It waits for events, not for streams, since another thread may be capturing a stream.
        """
        for event in events if self._written is None else (self._written, *events):
            stream.wait_event(event)
        if stream != self._owner:
            self._memory.record_stream(stream)  # the table may be dropped while the stream reads

    def read(self) -> Records:
        """The current records, for tests and debugging; waits for the device."""
        table: Records = self._memory.cpu().numpy().view(SPAN)
        return table[1 : 1 + int(table["offset"][0])]


class Prefetcher:
    """The prefetch kernel on one device, with `sms` CTAs. Threads take turns."""

    def __init__(self, device: torch.device, sms: int, keep: bool) -> None:
        """Build and load the kernel.

        Raises:
            CompileForbidden: the kernel is not built yet, and a CUDA graph is being captured.
            NoGpu, NoHostCompiler, NoCudaCompiler: the compiler is missing.
        """
        self._device = device
        spec = PrefetchSpec(keep)
        packer = Packer(spec.fields)
        self._block = Block(packer, packer.size)
        self._write = self._block.writer("Q", ("spans", *SOURCES))
        self._lock = forks.lock()
        on_gpu = device.type == "cuda"
        target = cuda_facts(device.index).arch if on_gpu else host_target()
        source = spec.render("cuda" if on_gpu else "cpp")
        self._launch = load(spec, source, target, device, sms, 1).bind(self._block)

    def launch(self, table: SpanTable, first_source: int = 0, second_source: int = 0) -> None:
        """Enqueue a prefetch on the current stream; it reads the table when the kernel runs."""
        with self._lock:
            self._write(table.address, first_source, second_source)
            if self._device.type == "cpu":
                self._launch(0)
                return
            with torch.cuda.device(self._device):
                stream = torch.cuda.current_stream(self._device)
                with table.read_by(stream):
                    self._launch(stream.cuda_stream)


def prefetcher(device: torch.device, sms: int = SMS, keep: bool = False) -> Prefetcher:
    """The prefetch kernel for a device.

    Raises:
        ArgumentError: the device has fewer SMs than `sms`.
        and those of `Prefetcher`.
    """
    most = cuda_facts(device.index).num_sms if device.type == "cuda" else 1 << 16
    if isinstance(sms, bool) or not isinstance(sms, int) or not 1 <= sms <= most:
        raise ArgumentError(name="sms", reason=f"is {sms!r}; expected 1 to {most}")
    return _made(device, sms, keep)


_made = lru_cache(maxsize=None)(Prefetcher)
