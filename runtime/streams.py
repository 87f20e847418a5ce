"""Order between the streams that use the same memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from warploom.runtime import shortcuts
from warploom.runtime.graph import is_capturing


class Streams:
    """Order between the streams that carry the plans and runs of one workspace.

    All of them use the same plan, partial results and counters, so each waits for the one before.
    On one stream everything is ordered by itself, and this costs a comparison. The same holds of
    captured launches: the streams that replay them are the caller's to order.

    Attributes:
        taken: told of each stream that follows another one, before work is enqueued there.
    """

    def __init__(
        self, device: torch.device, taken: Callable[[torch.cuda.Stream], None] | None = None
    ) -> None:
        """Begin before the first plan on a CUDA device."""
        self._device = device
        self.taken = taken
        self._index = device.index
        self._last: torch.cuda.Stream | None = None
        self._handle = -1

    def current(self) -> int:
        """Handle of the caller's stream, after making it wait for the last one if it is another."""
        handle = shortcuts.raw_stream(self._index)
        if handle != self._handle and not is_capturing(self._device):
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None:
                stream.wait_stream(self._last)
            if self.taken is not None:
                self.taken(stream)
            self._last, self._handle = stream, handle
        return handle

    def follow(self, other: Streams) -> None:
        """Let the caller's stream wait for what another workspace has enqueued, too."""
        if other._last is not None and not is_capturing(self._device):
            torch.cuda.current_stream(self._device).wait_stream(other._last)
