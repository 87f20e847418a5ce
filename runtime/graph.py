"""What must not happen while a CUDA graph is being captured, and how to notice."""

from __future__ import annotations

import torch

from warploom.errors import ForbiddenUnderCapture


def is_capturing(device: torch.device) -> bool:
    """True if the current stream of a CUDA device is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_under_capture(device: torch.device, what: str, remedy: str) -> None:
    """Raise if the current stream is being captured.

    Raises:
        ForbiddenUnderCapture: with `what` must not happen and `remedy`.
    """
    if is_capturing(device):
        raise ForbiddenUnderCapture(what=what, remedy=remedy)
