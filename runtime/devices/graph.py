"""What must not happen while a CUDA graph is being captured, and how to notice."""

from __future__ import annotations

import torch

from warploom.errors import CompileForbidden, ForbiddenUnderCapture
from warploom.runtime.tensors.shortcuts import current_device


def is_capturing(device: torch.device) -> bool:
    """True if the current stream of a device is being captured; only CUDA devices have some."""
    if device.type != "cuda":
        return False
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
