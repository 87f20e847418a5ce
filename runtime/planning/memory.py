"""The memory of a wrapper's plans: its workspace, and the kernel parameters that point to it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from warploom.errors import WorkspaceTooSmall
from warploom.runtime.devices.graph import refuse_under_capture
from warploom.runtime.devices.params import ParamBlock
from warploom.runtime.devices.upload import Upload
from warploom.runtime.devices.workspace import Workspace
from warploom.runtime.launching.kernels import Kernel
from warploom.runtime.planning.rules import Rules, grown
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.partition.fixed import ChunkCounts
from warploom.scheduler.plans.capacity import Capacity, WorkspaceSize
from warploom.scheduler.plans.plan import Plan


class PlanMemory:
    """Memory of one wrapper's plans; it holds the last plan.

    Attributes:
        workspace: memory of the last plan.
        upload: copies plans to the workspace.
        room: layout of the last plan; None before the first.
        number: number of plans so far.
    """

    def __init__(
        self, workspace: Workspace, params: ParamBlock, rules: Rules, device: torch.device
    ) -> None:
        self.workspace, self.upload, self._device = workspace, Upload(device), device
        self.room: Capacity | None = None
        self.number = 0
        self._params, self._rules = params, rules
        self._addressed: torch.Tensor | None = None  # what the kernel's parameters point to

    def fit(
        self, exact: Bounds, kernel: Kernel, chunks: ChunkCounts | None = None
    ) -> tuple[Capacity, WorkspaceSize]:
        """Layout and sizes for the declared bounds, else for the batch's own sizes, rounded up.

        Raises:
            WorkspaceTooSmall: the caller's memory cannot hold the batch.
        """
        sizes, bounds = self._rules.sizes, self._rules.options.bounds
        tile, ctas = kernel.tile, kernel.num_ctas
        if bounds is not None:
            return sizes(bounds, tile, ctas)
        try:
            room, size = sizes(grown(exact), tile, ctas, chunks and grown(chunks))
            self.workspace.check(size)
        except WorkspaceTooSmall:  # memory given by the caller may still hold this batch exactly
            room, size = sizes(exact, tile, ctas, chunks)
            self.workspace.check(size)
        return room, size

    def send(self, plan: Plan, room: Capacity, size: WorkspaceSize) -> None:
        """Lay the workspace out, and enqueue the upload of a plan on the current stream."""
        self.workspace.fit(size)
        target = self.workspace.plan_ints
        plan.pack(room, self.upload.stage(target).buffer[: len(target)].numpy())
        self.upload.send(room.offsets["indices"] + len(plan.indices))
        self.point_to(room)

    def point_to(self, room: Capacity) -> None:
        """Point the kernels' parameters to a plan of this layout."""
        if self._rules.spec.stamps:
            self.workspace.forget_stamps()
        target = self.workspace.plan_ints  # a new tensor whenever the workspace is laid out anew
        if target is self._addressed and room is self.room:
            return
        self._addressed, self.room = None, room  # an interrupt may come before all is written
        begin = self.workspace.address("plan")
        for section, offset in room.offsets.items():
            self._params.set(section, begin + 4 * offset)
        stamps = ("stamps",) if self._rules.spec.stamps else ()
        for part in ("partial_o", "partial_state", "arrivals", *stamps):
            if part not in room.offsets:
                self._params.set(part, self.workspace.address(part))
        self._addressed = target

    def packed(self, room: Capacity) -> npt.NDArray[np.int32]:
        """The last plan as it lies in memory: int32 (room.total_ints,).

        Raises:
            ForbiddenUnderCapture: the current stream, for which this waits, is being captured.
        """
        remedy = "Ask before the capture, or between replays."
        refuse_under_capture(self._device, "a plan was read back from the device", remedy)
        self.workspace.await_last()
        packed: npt.NDArray[np.int32] = self.workspace.plan_ints[: room.total_ints].cpu().numpy()
        return packed
