"""What a way to plan can do, and the plan that it makes.

`planner.Planner` holds them in order, and is the only one to know which there are.
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
        arrays: the batch that it is of.
    """

    plan: Plan
    visibility: Visibility
    arrays: Arrays


@dataclass(eq=False)
class Planned:
    """One plan that lies on the device; it never changes.

    Attributes:
        batch: what was planned.
        choice: the tile, with what spoke for it.
        kernel: of it.
        size: of the workspace.
        by: who planned, for `explain()`.
        read: reads the plan anew. One that a native planner wrote is read from the device when
            first asked for; if another has taken its place, NotPlanned says so.
        is_native: it is to be read so.
    """

    batch: Batch
    choice: TileChoice
    kernel: Kernel
    size: WorkspaceSize
    by: str
    read: Callable[[], Read]
    is_native: bool

    def __repr__(self) -> str:  # that of all parts has the kernel's source
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
        """The batch as it was planned, whatever has become of the index arrays since."""
        return self._once.arrays

    @property
    def given(self) -> tuple[Any, ...]:
        """The index arrays that `plan` was given: qo_indptr, kv_indptr, last_page_len, kv_indices.

        Ragged and dense storage has two of them. Only native plans have kept them.
        """
        if isinstance(self.batch, OnDevice):
            return self.batch.tensors
        assert isinstance(self.batch, Measured)
        return self.batch.lengths.kept


class Strategy(Protocol):
    """A way to plan."""

    def prepare(self) -> None:
        """Build what planning needs, so that no plan has to."""

    def read(self, given: Arguments) -> Batch | None:
        """Check the arguments and bring them into the form that suits this way best.

        None: another must read them, or say what is wrong with them.
        """

    def plan(self, batch: Batch, choice: TileChoice, inputs: Inputs) -> Planned | None:
        """Plan a batch, and enqueue what there is to copy on the current stream.

        None: it cannot for this tile, or with what is known of what the mask reads; another must.

        Raises:
            BoundsExceeded, WorkspaceTooSmall, ArgumentError: the batch does not fit; the plan
                before stays as it was.
            CompileError and others of `Kernels.get`.
        """
        ...
