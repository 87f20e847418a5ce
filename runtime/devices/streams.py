"""Order between the streams that use the same memory."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

import torch

from warploom.runtime.devices.graph import capture_number, is_capturing
from warploom.runtime.tensors import shortcuts


class Streams:
    """Order between the streams that carry the plans and runs of one workspace.

    All of them use the same plan, partial results and counters, so each waits for the one before.
    On one stream everything is ordered by itself, and this costs a comparison. Streams of one
    capture wait for each other as well, which becomes edges of the graph. The streams that replay
    graphs are the caller's to order.

    The last stream is remembered, so one that another library made (`torch.cuda.ExternalStream`)
    must outlive its use here: until a call on another stream, which waits for it, has been made
    outside of captures.
    torch's own streams are never destroyed. An event behind every launch would end that need, at a
    microsecond of host time for each run.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin before the first plan on a CUDA device."""
        self._device = device
        self._taken: WeakMethod[Callable[[torch.cuda.Stream], None]] | None = None
        self._index = device.index
        self._last: torch.cuda.Stream | None = None
        self._handle = -1
        self._captured: torch.cuda.Stream | None = None  # the last one of a capture, until it ends

    def tell(self, taken: Callable[[torch.cuda.Stream], None]) -> None:
        """Call a method with each stream that is new here, before work is enqueued there."""
        self._taken = WeakMethod(taken)  # the order may outlast whose work is ordered

    def current(self) -> int:
        """Handle of the caller's stream, after making it wait for the last one if it is another."""
        handle = shortcuts.raw_stream(self._index)
        if handle != self._handle or self._captured is not None:
            if is_capturing(self._device):
                self._follow_branches()
            else:
                self._captured = None
                self._follow_last(handle)
        return handle

    def used(self, tensor: torch.Tensor) -> None:
        """Keep torch from reusing a tensor's memory before streams are done with it.

        These are the caller's and the last one, on which runs may follow without another word.
        Graphs hold what their captures read (`graph_hold.py`).
        """
        if not tensor.is_cuda:
            return
        if is_capturing(self._device):
            self._handle = -1  # the next call outside of captures tells its stream
            return
        tensor.record_stream(torch.cuda.current_stream(self._device))
        if self._last is not None:
            tensor.record_stream(self._last)

    def _follow_last(self, handle: int) -> None:
        if handle == self._handle:
            return
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last.cuda_stream != handle:
            stream.wait_stream(self._last)
        taken = None if self._taken is None else self._taken()
        if taken is not None:
            taken(stream)
        self._last, self._handle = stream, handle

    def _follow_branches(self) -> None:
        """Let the captured stream wait for those of the same capture that launched before."""
        stream = torch.cuda.current_stream(self._device)
        number = capture_number(stream.cuda_stream)
        for other in (self._last, self._captured):
            if other is None or other.cuda_stream == stream.cuda_stream:
                continue
            if number and capture_number(other.cuda_stream) == number:
                stream.wait_stream(other)
        self._captured = stream

    def follow(self, other: Streams) -> None:
        """Let the caller's stream wait for what another workspace has enqueued, too."""
        if other._last is not None and not is_capturing(self._device):
            torch.cuda.current_stream(self._device).wait_stream(other._last)
