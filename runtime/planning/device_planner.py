"""The planner as a kernel: it plans from lengths in device memory, without the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.codegen.build import build
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.planner_source import planner_source
from warploom.dsl.types.spec import TracedVariant
from warploom.runtime.devices.cuda import CudaKernel
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.devices.graph import refuse_loading
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

    RESERVED = 528  # bytes of shared memory that `PlannerTeam` takes

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
        source = planner_source(variant, c_structs(), "cuda")
        refuse_loading(device, source.name)
        artifact = build(source, cuda_facts(device.index).arch)
        shape = LaunchShape(size.threads, self.RESERVED + size.scratch, 1)
        self._kernel = CudaKernel(source.name, artifact, shape, device.index)
        self._kernel.num_ctas = size.teams
        self.params = PlannerParams(variant)
        self.size = size

    def launch(self, stream: int) -> None:
        """Enqueue it on a stream, given the stream's handle."""
        self._kernel.launch(self.params, stream)
