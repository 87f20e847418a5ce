"""What must not happen while a CUDA graph is being captured, and how to notice.

The host has no graphs, but a twin that records calls (`warploom.serving.graphs`), under which the
same is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from warploom.errors import CompileForbidden, ForbiddenUnderCapture
from warploom.runtime.devices.cuda import load_driver
from warploom.runtime.tensors.shortcuts import current_device

_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


class _PoolCaptures(threading.local):
    """Whether a graph pool captures on this thread, and whether it is the host's twin that does."""

    is_on = on_host = False


pool_captures = _PoolCaptures()


@contextmanager
def pool_capture(device: torch.device) -> Iterator[None]:
    """Let calls of this thread be those of a pool's capture: it is replayed for later plans.

    On the CPU they are what a graph's would be, too: recorded.
    """
    found = pool_captures
    before = found.is_on, found.on_host
    found.is_on, found.on_host = True, device.type != "cuda"
    try:
        yield
    finally:
        found.is_on, found.on_host = before


def is_capturing(device: torch.device) -> bool:
    """True if the current stream of a device is being captured, or this thread's calls are."""
    if device.type != "cuda":
        return pool_captures.on_host
    if device.index in (None, current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def capture_number(stream: int) -> int:
    """The driver's number of the capture that a stream, by its handle, is part of; 0 if of none.

    The legacy default stream can be in no capture, and may not be asked while there is one.
    """
    if stream == 0:
        return 0
    status, capturing, number, *_ = load_driver().cuStreamGetCaptureInfo(stream)
    return int(number) if int(status) == 0 and int(capturing) == _ACTIVE else 0


def refuse_under_capture(device: torch.device, what: str, remedy: str) -> None:
    """Raise if the current stream is being captured.

    Raises:
        ForbiddenUnderCapture: with `what` must not happen and `remedy`.
    """
    if is_capturing(device):
        raise ForbiddenUnderCapture(what=what, remedy=remedy)


def refuse_loading(device: torch.device, kernel: str) -> None:
    """Raise if the current stream is being captured and a kernel would have to be loaded.

    Raises:
        CompileForbidden: for the kernel of this name.
    """
    if is_capturing(device):
        raise CompileForbidden(kernel=kernel, cause="a CUDA graph is being captured")


def refuse_stale_plans() -> None:
    """Raise if a pool captures, for a wrapper whose plans move between batches.

    Raises:
        ForbiddenUnderCapture: since a replay would read the plan of the capture, or freed memory.
    """
    if pool_captures.is_on:
        raise ForbiddenUnderCapture(
            what="run() of a wrapper was called whose later plans a replay would not see,",
            remedy="Make it with cuda_graph=True and bounds=Bounds(...), or leave it out: "
            "GraphPiece(..., captured='never').",
        )
