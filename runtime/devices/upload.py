"""Copies of plans into a fixed device buffer, on the caller's stream, without waiting for it."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from weakref import finalize

import torch

from warploom.runtime.devices.cuda import copy_on_device, copy_to_device
from warploom.runtime.tensors import shortcuts

_RING = 4  # plans that may be on their way to the device at the same time


class Stage:
    """Memory of the host where a plan is packed.

    Attributes:
        buffer: int32, as long as the longest plan that was packed there.
        address: of the buffer.
        length: of the buffer.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.hold(buffer)

    def hold(self, buffer: torch.Tensor) -> None:
        """Pack plans there from now on."""
        self.buffer, self.address, self.length = buffer, buffer.data_ptr(), buffer.numel()


class PinnedStage(Stage):
    """Pinned memory, and an event that tells when its last copy is done.

    Attributes:
        event: recorded behind each copy.
    """

    def __init__(self) -> None:
        super().__init__(torch.empty(0, dtype=torch.int32))
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]


# By device. A copy may still read a stage when its upload is gone, and torch does not know of it,
# so stages are not freed: the next upload takes them, and waits for their events as for its own.
_spare: defaultdict[int, list[PinnedStage]] = defaultdict(list)


def _take_stage(device: int) -> PinnedStage:
    try:
        return _spare[device].pop()
    except IndexError:
        return PinnedStage()


class Upload:
    """Copies plans from the host into a fixed device buffer, on the caller's stream.

    A plan is packed in pinned memory, which must not change before its copy is done. A ring of
    stages lets `plan` run ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._index = device.index
        self._turn = 0
        self._stream: torch.cuda.Stream | None = None
        self._handle = -1  # of that stream
        self._target = Stage(torch.empty(0, dtype=torch.int32))  # of the last plan

    @cached_property
    def _ring(self) -> list[PinnedStage]:
        ring = [_take_stage(self._index) for _ in range(_RING)]
        finalize(self, _spare[self._index].extend, ring)
        return ring

    def stage(self, target: torch.Tensor) -> Stage:
        """Memory of the host that no copy reads, at least as long as `target`.

        Args:
            target: int32 device tensor.
        """
        if target is not self._target.buffer:
            self._target = Stage(target)
        if not self._is_cuda:
            return self._target
        stage = self._ring[self._turn]
        stage.event.synchronize()  # at once, if it was never recorded
        if stage.length < self._target.length:
            stage.hold(torch.empty(self._target.length, dtype=torch.int32, pin_memory=True))
        return stage

    def send(self, used: int) -> None:
        """Copy so many entries of what was staged last to its target."""
        if not self._is_cuda:
            return
        handle = shortcuts.raw_stream(self._index)
        if handle != self._handle:
            self._stream, self._handle = torch.cuda.current_stream(self._index), handle
        target, stage = self._target, self._ring[self._turn]
        self._turn = (self._turn + 1) % _RING  # first: an interrupt may come behind the copy
        is_current = shortcuts.current_device() == self._index
        copy = copy_to_device()
        if not is_current or copy(target.address, stage.address, 4 * used, handle) != 0:
            # of another device, or a thread that has not touched CUDA yet: torch sees to both
            target.buffer[:used].copy_(stage.buffer[:used], non_blocking=True)
        stage.event.record(self._stream)

    def append(self, source: torch.Tensor, begin: int, count: int) -> None:
        """Copy the first entries of a tensor to the target of what was staged last.

        Args:
            source: int32, contiguous, on any device.
            begin: where they go, behind what is sent.
            count: how many.
        """
        target, address = self._target, source.data_ptr() if self._is_cuda else 0
        if address and source.get_device() == self._index == shortcuts.current_device():
            to, stream = target.address + 4 * begin, shortcuts.raw_stream(self._index)
            if copy_on_device()(to, address, 4 * count, stream) == 0:
                return
        target.buffer[begin : begin + count].copy_(source[:count])
