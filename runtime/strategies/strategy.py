"""The interface of planning strategies, and the plan that a strategy makes.

`planner.Planner` holds the strategies in order; nothing else knows which there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from warploom.codegen.source import TileChoice
from warploom.runtime.formats.batch import Arguments, Arrays, Batch, Measured, OnDevice
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.kernels import Kernel
from warploom.scheduler.model.visibility import Visibility
from warploom.scheduler.plans.capacity import WorkspaceSize
from warploom.scheduler.plans.plan import Plan


class Read(NamedTuple):
    """A plan as the host sees it.

    Attributes:
        plan: the plan.
        visibility: the mask's answers for it.
        arrays: its batch.
    """

    plan: Plan
    visibility: Visibility
    arrays: Arrays


@dataclass(eq=False)
class Planned:
    """One plan that lies on the device; it never changes.

    Attributes:
        batch: what was planned.
        choice: the tile, with the reason for it.
        kernel: the kernel of this tile.
        size: size of the workspace.
        by: name of the planner, for `explain()`.
        read: reads the plan anew. A plan of a native planner is read from the device when first
            needed; raises NotPlanned if another plan has taken its place.
        is_native: a native planner wrote it.
    """

    batch: Batch
    choice: TileChoice
    kernel: Kernel
    size: WorkspaceSize
    by: str
    read: Callable[[], Read]
    is_native: bool

    def __repr__(self) -> str:  # the default would include the kernel's source
        ctas = self.kernel.num_ctas
        return f"{type(self).__name__}(tile={self.choice.tile}, num_ctas={ctas}, by={self.by!r})"

    @cached_property
    def _once(self) -> Read:
        return self.read()

    @property
    def plan(self) -> Plan:
        return self._once.plan

    @property
    def visibility(self) -> Visibility:
        return self._once.visibility

    @property
    def arrays(self) -> Arrays:
        """The batch as it was planned, even if the index arrays have changed since."""
        return self._once.arrays

    @property
    def given(self) -> tuple[Any, ...]:
        """The index arrays that `plan` was given: qo_indptr, kv_indptr, last_page_len, kv_indices.

        Ragged and dense storage has only the first two. Only native plans keep them.
        """
        if isinstance(self.batch, OnDevice):
            return self.batch.tensors
        assert isinstance(self.batch, Measured)
        return self.batch.lengths.kept


class Strategy(Protocol):
    """A way to plan."""

    def prepare(self) -> None:
        """Build what planning needs, so that no later call has to."""

    def read(self, given: Arguments) -> Batch | None:
        """Check the arguments and bring them into the form that this strategy plans from.

        None: another strategy must read them, or report what is wrong with them.
        """

    def plan(self, batch: Batch, choice: TileChoice, inputs: Inputs) -> Planned | None:
        """Plan a batch, and enqueue the necessary copies on the current stream.

        None: this strategy cannot plan for this tile, or does not know the values that the mask
        reads; another strategy must plan.

        Raises:
            BoundsExceeded, WorkspaceTooSmall, ArgumentError: the batch does not fit; the previous
                plan stays as it was.
            CompileError and others of `Kernels.get`.
        """
        ...
