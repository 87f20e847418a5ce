"""Copies of plans into a fixed device buffer, on the caller's stream, without waiting for it."""

from __future__ import annotations

from collections import defaultdict
from ctypes import addressof
from functools import cached_property
from weakref import finalize

import torch

from warploom.runtime.devices.cuda import beside_captures, copy_on_device, copy_to_device
from warploom.runtime.devices.delivery import STAGES, Delivery
from warploom.runtime.devices.graph import pool_captures
from warploom.runtime.tensors import shortcuts


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
        self.event.record()  # makes it, which torch puts off until then


_NOWHERE = torch.empty(0, dtype=torch.int32)
# By device. A copy may still read a stage when its upload is gone, and torch does not know of it,
# so stages are not freed: the next upload takes them, and waits for their events as for its own.
_spare: defaultdict[int, list[PinnedStage]] = defaultdict(list)


def _take_stage(device: int) -> PinnedStage:
    try:
        return _spare[device].pop()
    except IndexError:
        with torch.cuda.device(device):
            return PinnedStage()


class Upload:
    """Copies plans from the host into a fixed device buffer, on the caller's stream.

    A plan is packed in pinned memory, which must not change before its copy is done. A ring of
    stages lets `plan` run ahead of the device; where it does not, the stage of the plan before is
    taken again, which the caches of the host still hold.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._index = device.index
        self._stream: torch.cuda.Stream | None = None
        self._handle = -1  # of that stream
        self._target = Stage(_NOWHERE)  # of the last plan
        self._delivery = Delivery()
        self._delivery_at = addressof(self._delivery)

    @cached_property
    def _ring(self) -> list[PinnedStage]:
        ring = [_take_stage(self._index) for _ in range(STAGES)]
        finalize(self, _spare[self._index].extend, ring)
        self._delivery.call_driver()
        for sending, stage in zip(self._delivery.stages, ring, strict=True):
            sending.event = stage.event.cuda_event
        return ring

    def stage(self, target: torch.Tensor) -> Stage:
        """Memory of the host that no copy reads, at least as long as `target`.

        Args:
            target: int32 device tensor.
        """
        if target is not self._target.buffer:
            self._aim(Stage(target))
        if not self._is_cuda:
            return self._target
        with beside_captures():
            return self._free_stage()

    def _free_stage(self) -> PinnedStage:
        stage = self._ring[self._delivery.last]
        if not stage.event.query():  # type: ignore[no-untyped-call]
            stage = self._pass()
            stage.event.synchronize()
        if stage.length < self._target.length:
            stage.hold(torch.empty(self._target.length, dtype=torch.int32, pin_memory=True))
        self._delivery.stages[self._delivery.last].memory = stage.address
        return stage

    def _aim(self, target: Stage) -> None:
        """Send to another place from now on."""
        self._target, delivery = Stage(_NOWHERE), self._delivery  # an interrupt may come meanwhile
        delivery.target = target.address
        if self._is_cuda:
            for each, stage in zip(delivery.stages, self._ring, strict=True):
                each.memory = stage.address if stage.length >= target.length else 0
        else:
            delivery.stages[0].memory = target.address
        self._target = target  # last, or compiled code would be told the half of it

    def _pass(self) -> PinnedStage:
        """Go on to the next stage."""
        self._delivery.last = following = (self._delivery.last + 1) % STAGES
        return self._ring[following]

    def delivery(self, target: torch.Tensor, pages: torch.Tensor | None) -> int | None:
        """By what compiled code takes a stage, as `stage` does, and sends what it writes there.

        What it cannot send is for `append` and `send`.

        Args:
            target: int32 device tensor.
            pages: page numbers that stay on the device, int32; None: plans hold them.

        Returns:
            Address of a `Delivery`. None where `stage` and `send` must see to it, since the target
            is another than that of the last `stage`, or another device is the current one; and
            where a graph of the CPU is being captured. Compiled code asks whether one of the device
            is.
        """
        if target is not self._target.buffer:
            return None
        if not self._is_cuda:
            return self._delivery_at if pages is None and not pool_captures.on_host else None
        index, delivery = self._index, self._delivery
        if shortcuts.current_device() != index:
            return None
        delivery.stream, delivery.pages = shortcuts.raw_stream(index), 0
        if pages is not None:
            if pages.get_device() != index:
                return None
            delivery.pages = pages.data_ptr()
        return self._delivery_at

    def send(self, used: int) -> None:
        """Copy so many entries of what was staged last to its target."""
        if not self._is_cuda:
            return
        handle = shortcuts.raw_stream(self._index)
        if handle != self._handle:
            self._stream, self._handle = torch.cuda.current_stream(self._index), handle
        target, last = self._target, self._delivery.last
        stage = self._ring[last]
        self._pass()  # an interrupt may come behind the copy, and this stage must not be next
        is_current = shortcuts.current_device() == self._index
        copy = copy_to_device()
        if not is_current or copy(target.address, stage.address, 4 * used, handle) != 0:
            # of another device, or a thread that has not touched CUDA yet: torch sees to both
            target.buffer[:used].copy_(stage.buffer[:used], non_blocking=True)
        stage.event.record(self._stream)
        self._delivery.last = last

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
