"""The planner as a kernel: it plans from lengths in device memory, without the host."""

from __future__ import annotations

import torch

from warploom.codegen.build import build
from warploom.codegen.planner_source import planner_source
from warploom.codegen.tiles import LaunchShape
from warploom.dsl.spec import TracedVariant
from warploom.errors import CompileForbidden
from warploom.runtime.cuda import CudaKernel
from warploom.runtime.device import cuda_facts
from warploom.runtime.graph import is_capturing
from warploom.runtime.planner_params import PlannerParams
from warploom.scheduler.layout import c_structs

_THREADS = 1024
_MOST_TEAMS = 32  # all of them find the cuts, and share the writing


class DevicePlanner:
    """The planner kernel of one mask, with memory for batches of one size.

    Attributes:
        params: its argument.
        scratch: bytes of shared memory that each CTA works in.
    """

    RESERVED = 512  # bytes of shared memory that `PlannerTeam` takes

    def __init__(
        self, variant: TracedVariant, device: torch.device, scratch: int, items: int
    ) -> None:
        """Build and load the kernel.

        Args:
            variant: its mask counts.
            device: where it runs.
            scratch: bytes that it works in.
            items: most work items that it writes.

        Raises:
            CompileForbidden: a CUDA graph is being captured.
            CompileError, NoCudaCompiler, LaunchError: it could not be made.
        """
        source = planner_source(variant, c_structs(), "cuda")
        if is_capturing(device):
            raise CompileForbidden(kernel=source.name, cause="a CUDA graph is being captured")
        artifact = build(source, cuda_facts(device.index).arch)
        shape = LaunchShape(_THREADS, self.RESERVED + scratch, 1)
        self._kernel = CudaKernel(source.name, artifact, shape, device.index)
        self._kernel.num_ctas = max(1, min(_MOST_TEAMS, -(-items // _THREADS)))
        self.params = PlannerParams(variant)
        self.scratch = scratch

    def launch(self, stream: int) -> None:
        """Enqueue it on a stream, given the stream's handle."""
        self._kernel.launch(self.params, stream)
