"""Cached device copies of host tensors, copied again when their source was written."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from warploom import forks
from warploom.dsl.types.dtypes import DType
from warploom.logs import log
from warploom.runtime.devices.graph import is_capturing, refuse_under_capture


def refuse_copying(device: torch.device, may_be_kept: bool = False) -> None:
    """Raise ForbiddenUnderCapture if `device` is capturing: a host tensor had to be copied now.

    Args:
        device: the destination.
        may_be_kept: whether a copy from before the capture would be used, so the message says so.
    """
    earlier = ", or call with it once before the capture" if may_be_kept else ""
    what, remedy = "a tensor on the host had to be copied", f"Put it on the device{earlier}."
    refuse_under_capture(device, what, remedy)


class DeviceCopy:
    """One copy, and the streams that may read it.

    Attributes:
        tensor: the copy.
        version: version of the source when it was copied.
    """

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        """Take a copy that was just allocated and enqueued on the current stream."""
        self.tensor = tensor
        self.version = version
        self._readers: dict[int, torch.cuda.Stream] = {}
        self._owner = self._writer = self._current()

    def _current(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.tensor.device) if self.tensor.is_cuda else None

    def renew(self, host: torch.Tensor, version: int) -> None:
        """Copy again, after all enqueued reads of the old contents."""
        stream = self._current()
        if stream is not None:
            for reader in self._readers.values():
                stream.wait_stream(reader)
        self.tensor.copy_(host)
        self.version = version
        self._readers.clear()
        self._writer = stream

    def use(self) -> torch.Tensor:
        """The copy, for work enqueued next on the current stream, which waits for the last write.

        Captured work waits for nothing: the caller must order its replays.
        """
        if self._writer is None or is_capturing(self.tensor.device):
            return self.tensor
        stream = torch.cuda.current_stream(self.tensor.device)
        if stream.cuda_stream not in self._readers:
            self._readers[stream.cuda_stream] = stream
            if stream != self._writer:
                stream.wait_stream(self._writer)
            if stream != self._owner:
                self.tensor.record_stream(stream)  # the copy may be dropped while the stream reads
        return self.tensor


_Copies: TypeAlias = dict[tuple[torch.device, DType], DeviceCopy]


class DeviceCopies:
    """Copies by the identity of their source; a copy lives as long as its source.

    A changed source is copied into the same memory, so that a captured CUDA graph reads the values
    of the last call. Changes are detected by torch's version counter, which does not count writes
    through `.data` or through an array that shares the memory. Any thread and stream may call it.
    """

    def __init__(self) -> None:
        self._copies: MutableMapping[torch.Tensor, _Copies] = WeakTensorKeyDictionary()
        self._lock = forks.lock()

    def __call__(
        self,
        source: torch.Tensor,
        device: torch.device,
        dtype: DType,
        host: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """The copy of `source` on a device.

        Args:
            source: the host tensor, as its owner holds it.
            device: device of the copy.
            dtype: type that the kernel reads.
            host: returns `source` converted to that type.

        Raises:
            ForbiddenUnderCapture: a CUDA graph is being captured, and there is no copy yet, or the
                source was written since.
        """
        if source.is_inference():  # torch does not count writes to inference tensors
            refuse_copying(device)
            return host().to(device)
        version = source._version
        with self._lock:
            copies = self._copies.setdefault(source, {})
            copy = copies.get((device, dtype))
            if copy is None or copy.tensor.shape != source.shape:
                refuse_copying(device, may_be_kept=True)
                log.debug("copying a tensor of shape %s to %s", tuple(source.shape), device)
                copy = copies[device, dtype] = DeviceCopy(host().to(device), version)
            elif copy.version != version:
                refuse_copying(device, may_be_kept=True)
                copy.renew(host(), version)
            return copy.use()
