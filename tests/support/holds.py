"""What stands for CUDA graphs in tests without a GPU."""

from __future__ import annotations

from typing import Any

import torch

from warploom.runtime.devices.graph_hold import KeptForGraphs


class FakeHold:
    """A `GraphHold`; `graphs` are those that captured it and still exist."""

    def __init__(self) -> None:
        self.graphs = 0

    def attach(self, device: torch.device) -> None:
        self.graphs += 1

    def is_released(self) -> bool:
        return self.graphs == 0


def destroy_graphs(kept: KeptForGraphs[Any]) -> None:
    """Destroy all graphs that read what is kept by `FakeHold`."""
    for _, hold in kept._kept:
        assert isinstance(hold, FakeHold)
        hold.graphs = 0
