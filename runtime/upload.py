"""Copies of plans into a fixed device buffer, on the caller's stream, without waiting for it."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from weakref import finalize

import torch

from warploom.runtime import shortcuts
from warploom.runtime.cuda import copy_to_device

_RING = 4  # plans that may be on their way to the device at the same time


class Stage:
    """Pinned memory, and an event that tells when its last copy is done.

    Attributes:
        buffer: int32, as long as the longest plan that was packed there.
        event: recorded behind each copy.
    """

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.int32)
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]


# By device. A copy may still read a stage when its upload is gone, and torch does not know of it,
# so stages are not freed: the next upload takes them, and waits for their events as for its own.
_spare: defaultdict[int, list[Stage]] = defaultdict(list)


def _take_stage(device: int) -> Stage:
    try:
        return _spare[device].pop()
    except IndexError:
        return Stage()


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

    @cached_property
    def _ring(self) -> list[Stage]:
        ring = [_take_stage(self._index) for _ in range(_RING)]
        finalize(self, _spare[self._index].extend, ring)
        return ring

    def stage(self, target: torch.Tensor) -> torch.Tensor:
        """Memory of the host that no copy reads, at least as long as `target`.

        Args:
            target: int32 device tensor.
        """
        if not self._is_cuda:
            return target
        self._turn = (self._turn + 1) % _RING
        stage = self._ring[self._turn]
        stage.event.synchronize()  # at once, if it was never recorded
        if stage.buffer.numel() < target.numel():
            stage.buffer = torch.empty(target.numel(), dtype=torch.int32, pin_memory=True)
        return stage.buffer

    def send(self, target: torch.Tensor, used: int) -> None:
        """Copy so many entries of what was staged last to `target`."""
        if not self._is_cuda:
            return
        handle = shortcuts.raw_stream(self._index)
        if handle != self._handle:
            self._stream, self._handle = torch.cuda.current_stream(self._index), handle
        stage = self._ring[self._turn]
        addresses = target.data_ptr(), stage.buffer.data_ptr()
        is_current = shortcuts.current_device() == self._index
        if not is_current or copy_to_device()(*addresses, 4 * used, handle) != 0:
            # of another device, or a thread that has not touched CUDA yet: torch sees to both
            target[:used].copy_(stage.buffer[:used], non_blocking=True)
        stage.event.record(self._stream)
