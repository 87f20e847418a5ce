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
from warploom.runtime.tensors.shortcuts import current_device


class _HostCapture(threading.local):
    is_on = False


_host = _HostCapture()


@contextmanager
def host_capture() -> Iterator[None]:
    """Let calls of this thread on the CPU be what a graph's would be: recorded."""
    before, _host.is_on = _host.is_on, True
    try:
        yield
    finally:
        _host.is_on = before


def is_capturing(device: torch.device) -> bool:
    """True if the current stream of a device is being captured, or this thread's calls are."""
    if device.type != "cuda":
        return _host.is_on
    if device.index in (None, current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


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
