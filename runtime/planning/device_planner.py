"""The planner as a kernel: it plans from lengths in device memory, without the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.codegen.planner_source import PlannerSpec
from warploom.dsl.types.spec import TracedVariant
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.devices.loaded import load
from warploom.runtime.planning.planner_params import PlannerParams
from warploom.scheduler.layout import c_structs

_MOST_THREADS = 1024
_MOST_TEAMS = 32  # all of them find the cuts, and share the writing
_ITEMS, _BLOCKS = 32, 2048  # of a team, with which it is as fast as with fewer


@dataclass(frozen=True)
class PlanSize:
    """The most that a planner works on.

    Attributes:
        scratch: bytes that it works in.
        tiles: query tiles.
        boundaries: candidates for the boundaries between CTAs.
        items: work items.
        blocks: pages.
    """

    scratch: int
    tiles: int
    boundaries: int
    items: int
    blocks: int

    @property
    def threads(self) -> int:
        """A thread for each tile and each boundary; more only wait for one another."""
        wanted = max(self.tiles, self.boundaries, 128)
        return min(_MOST_THREADS, -(-wanted // 128) * 128)

    @property
    def teams(self) -> int:
        """Teams that share the writing."""
        wanted = max(-(-self.items // _ITEMS), -(-self.blocks // _BLOCKS), 1)
        return min(_MOST_TEAMS, wanted)


class DevicePlanner:
    """The planner kernel of one mask, with memory for batches of one size.

    Attributes:
        params: its argument.
        size: the most that it works on.
    """

    def __init__(self, variant: TracedVariant, device: torch.device, size: PlanSize) -> None:
        """Build and load the kernel.

        Args:
            variant: its mask counts.
            device: where it runs.
            size: of the largest batch.

        Raises:
            CompileForbidden: a CUDA graph is being captured.
            CompileError, NoCudaCompiler, LaunchError: it could not be made.
        """
        spec = PlannerSpec(variant, size.threads, size.scratch)
        source = spec.render("cuda", c_structs())
        kernel = load(spec, source, cuda_facts(device.index).arch, device, size.teams)
        self.params = PlannerParams(variant)
        self._enqueue, self._device = kernel.bind(self.params), device
        self.size = size

    def launch(self, stream: int) -> None:
        """Enqueue it on a stream, given the stream's handle."""
        with torch.cuda.device(self._device):
            self._enqueue(stream)
