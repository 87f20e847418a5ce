"""The planning strategies in order: on the device, natively on the host, by NumPy.

The device plans if bounds are declared and leave less than four query tiles for each request,
storage is paged or ragged, all index arrays are contiguous int32 tensors on the wrapper's device,
and the plan need not be batch invariant. With one tile its plan is the host's, bit for bit; with
two roles it deals no prefills, as the host may (decision 0062), so plans may differ, and with them
the last bits of outputs. Requests that a replay of a captured plan does not use have no rows and no
keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from warploom.codegen.source import TileChoice, TileConfig
from warploom.codegen.stamps import STAMP
from warploom.dsl.types.spec import AttentionSpec
from warploom.env import verify_plans
from warploom.errors import ArgumentError, BatchRefused, NotReplayed, NotRun
from warploom.runtime.devices.graph import is_capturing, refuse_under_capture
from warploom.runtime.devices.params import ParamBlock
from warploom.runtime.devices.workspace import Workspace
from warploom.runtime.formats.batch import Arguments, Batch, RoleSizes, RoleTiles
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.kernels import Kernels
from warploom.runtime.planning.composed import rules_of
from warploom.runtime.planning.memory import PlanMemory
from warploom.runtime.planning.plan_status import GOOD, REASONS
from warploom.runtime.planning.rules import Options
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies.device_strategy import DeviceStrategy
from warploom.runtime.strategies.host_strategy import HostStrategy
from warploom.runtime.strategies.numpy_strategy import NumpyStrategy
from warploom.runtime.strategies.size_classes import SizeClasses
from warploom.runtime.strategies.strategy import Planned, Strategy
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.layout import HEADER, Records
from warploom.scheduler.plans.capacity import WorkspaceSize
from warploom.scheduler.plans.plan import Plan

_REMEDY = "Call it before or after, or declare bounds and give lengths that lie on the device."


class Planner:
    """Plans of one wrapper.

    Attributes:
        rules: tiles and sizes of the plans.
        verifies: whether every plan is to be checked by `verify`.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        heads: Heads,
        kernels: Kernels,
        workspace: Workspace,
        params: ParamBlock,
        options: Options,
        device: torch.device,
    ) -> None:
        self.rules = rules = rules_of(spec, kernels, heads, options, device)
        self.verifies = verify_plans()
        self._kernels, self._device = kernels, device
        self._memory = memory = PlanMemory(workspace, params, rules, device)
        self._classes = classes = SizeClasses(rules, kernels, memory)
        self._numpy = NumpyStrategy(rules, kernels, memory)
        self._strategies = DeviceStrategy(classes), HostStrategy(classes), self._numpy

    def replan(self, given: Arguments) -> Planned | None:
        """Plan a batch like the last one in few calls; None if it differs: `read` and `plan` it.

        Args:
            given: the arguments of `plan`; inputs have the same values as for the last plan.
        """
        return self._strategies[1].replan(given)

    def read(self, given: Arguments) -> Batch:
        """Check the arguments of `plan` and bring them into the form of a suitable strategy.

        Raises:
            Those of `make_batch`.
            ArgumentError: the batch does not have q_rows rows.
            ForbiddenUnderCapture: the current stream is being captured, and the host must plan.
        """
        on_device, natively, by_numpy = self._strategies
        natively.forget()  # another strategy may plan this batch
        captured = on_device.read(given)
        if captured is not None:
            return captured
        refuse_under_capture(self._device, "plan() was called", _REMEDY)
        batch = natively.read(given)
        return as_many_rows(by_numpy.read(given) if batch is None else batch, given.q_rows)

    def plan(self, batch: Batch, inputs: Inputs) -> Planned:
        """Plan a batch on the current stream; raises as `Strategy.plan` does."""
        self._memory.number += 1
        self._strategies[1].forget()
        # Only once: arrays of lengths may belong to the caller, who may change them.
        choice = self.choice(batch, inputs)
        strategies: tuple[Strategy, ...] = self._strategies
        for strategy in strategies:
            planned = strategy.plan(batch, choice, inputs)
            if planned is not None:
                return planned
        raise RuntimeError("NumPy plans every batch")

    def choice(self, batch: Batch, inputs: Inputs) -> TileChoice:
        """The tile of a batch, with the values that the mask reads."""
        return self.rules.choice(batch, partial(self._role_tiles, batch, inputs))

    def _role_tiles(self, batch: Batch, inputs: Inputs, sizes: RoleSizes) -> RoleTiles:
        """Key tiles of both roles, counted natively if the batch was measured so, else by NumPy."""
        natively = self._strategies[1].count(batch, inputs, sizes)
        if natively is not None:
            return natively
        return self.rules.role_tiles(batch.on_host, inputs, sizes)

    def verify(self, planned: Planned, inputs: Inputs) -> None:
        """Check the last plan, unless a graph is being captured, whose replay will make the plan.

        Args:
            planned: the plan.
            inputs: inputs with which it was planned.

        Raises:
            PlanInvalid: what is wrong with it.
        """
        if is_capturing(self._device):
            return
        if planned.is_native:
            self._classes.verify(planned, inputs)
        else:
            self._numpy.verify(planned)

    def prepare(self) -> None:
        """Build what planning needs, so that no later call has to."""
        for strategy in self._strategies:
            strategy.prepare()

    def check_status(self) -> None:
        """Raise BatchRefused if the device found something wrong; waits for the plan.

        Also raises NotReplayed if only a replay makes the plan and there was none; PlanMismatch if
        another wrapper has planned there since; and ForbiddenUnderCapture if the current stream,
        for which this waits, is being captured.
        """
        remedy = "Call it before the capture, or between replays."
        refuse_under_capture(self._device, "check_plan() was called", remedy)
        workspace = self._memory.workspace
        workspace.check_held()
        workspace.await_last()
        at = [name for name, _ in HEADER.fields].index("status")
        status = int(workspace.plan_ints[at])
        if not 0 <= status < len(REASONS):  # no plan was written to this memory
            raise NotReplayed
        if status != GOOD:
            raise BatchRefused(reason=REASONS[status])

    def stamps(self, planned: Planned) -> tuple[Plan, Records]:
        """When each work item ran last, from kernels with stamps; waits for the device.

        Args:
            planned: the last plan.

        Returns:
            The plan as it lies in memory, where replays may have made it anew, and a STAMP record
            for each of its items.

        Raises:
            NotRun: an item has not run since it was planned.
            PlanMismatch: another wrapper has planned there since.
            ForbiddenUnderCapture: the current stream is being captured.
            NotReplayed: no replay has made the plan of the lengths that lie on the device.
        """
        remedy = "Ask before the capture, or between replays."
        refuse_under_capture(self._device, "times of work items were asked for", remedy)
        workspace = self._memory.workspace
        workspace.check_held()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the streams of replays are unknown
        plan = planned.read().plan
        memory: npt.NDArray[np.uint8] = workspace.stamps.cpu().numpy()
        stamps = memory.view(STAMP)[: len(plan.items)].copy()  # CPU runs write to this memory
        missing = int((stamps["end"] == 0).sum())
        if missing:
            raise NotRun(missing=missing, items=len(stamps))
        return plan, stamps

    def choices(self) -> list[TileChoice]:
        """Every choice that a plan can have."""
        return self.rules.choices()

    def largest_size(self, bounds: Bounds) -> WorkspaceSize:
        """The largest workspace that any of the possible choices needs."""
        return self._largest(
            (bounds, choice.tile, self._kernels.get(choice).num_ctas) for choice in self.choices()
        )

    def _largest(self, needs: Iterable[tuple[Bounds, TileConfig, int]]) -> WorkspaceSize:
        sizes = [self.rules.sizes(*need)[1] for need in needs]
        return max(sizes, key=lambda size: size.total)

    def reserve(self) -> None:
        """Build the kernel and lay the workspace out, if the bounds fix both.

        Raises:
            WorkspaceTooSmall: the caller's memory cannot hold all batches within the bounds.
        """
        fixed, bounds = self.rules.fixed, self.rules.options.bounds
        workspace = self._memory.workspace
        if fixed is not None:
            kernel = self._kernels.get(fixed)
            if bounds is not None:
                workspace.fit(self._largest([(bounds, kernel.tile, kernel.num_ctas)]))
        elif bounds is not None and workspace.is_given:
            least = self._kernels.least_ctas  # once built, kernels on a GPU may ask for more
            workspace.check(self._largest((bounds, one.tile, least) for one in self.choices()))


def as_many_rows(batch: Batch, q_rows: int | None) -> Batch:
    """The batch; raises ArgumentError if it does not have `q_rows` rows, those of q."""
    if q_rows not in (None, batch.q_rows):
        raise ArgumentError(name="q_rows", reason=f"is {q_rows}; the batch has {batch.q_rows}")
    return batch
