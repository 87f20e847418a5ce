"""What stands for CUDA graphs in tests without a GPU."""

from __future__ import annotations

import torch


class FakeHold:
    """A `GraphHold`; `graphs` are those that captured it and still exist."""

    def __init__(self) -> None:
        self.graphs = 0

    def attach(self, device: torch.device) -> None:
        self.graphs += 1

    def is_released(self) -> bool:
        return self.graphs == 0
