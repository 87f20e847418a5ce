"""An order that transformers leaves out: a step's inputs are emptied before they are written.

Asynchronous batching, its default where steps lie in CUDA graphs, empties the tensors of a new run
on the default stream of a device, and copies the first step's inputs to them on a stream of its
own. Nothing makes the copies wait. On a busy GPU they lose in some runs: the first step then reads
zeros before any attention runs, and whoever shares its prompt gets wrong tokens without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_Reset = Callable[..., None]


def wait_for_resets() -> None:
    """Make the host wait for a device that empties all inputs, which is once in a run."""
    from transformers.generation.continuous_batching import input_outputs

    ios: Any = input_outputs.ContinuousBatchingIOs
    if ios._reset_static_tensors.__module__ != __name__:
        ios._reset_static_tensors = waiting(ios._reset_static_tensors)


def waiting(reset: _Reset) -> _Reset:
    """The same method, which returns when a full reset is done."""

    def reset_and_wait(ios: Any, full_reset: bool = False) -> None:
        reset(ios, full_reset=full_reset)
        if full_reset and ios.device.type == "cuda":
            torch.cuda.current_stream(ios.device).synchronize()

    return reset_and_wait
