"""Size classes: layouts of native plans, by host or device, and how plans are read back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from warploom.codegen.source import TileChoice
from warploom.errors import NotPlanned, NotReplayed
from warploom.runtime.devices.graph import is_capturing
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Arrays, Measured, OnDevice
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.kernels import Kernel, Kernels
from warploom.runtime.planning.memory import PlanMemory
from warploom.runtime.planning.plan_status import GOOD
from warploom.runtime.planning.rules import Rules
from warploom.runtime.planning.verify_plans import (
    check_batch,
    check_header,
    holds_plan_of,
    verify_planned,
)
from warploom.runtime.strategies.site import LongestFirst, Site
from warploom.runtime.strategies.strategy import Planned, Read
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.problem import Partition
from warploom.scheduler.plans.capacity import WorkspaceSize
from warploom.scheduler.plans.unpack import unpack, unpack_batch

_KEPT = 16  # most choices with size classes
_SIZES = 4  # most classes kept per choice: making a class takes longer than making a plan
_Unpacked: TypeAlias = tuple[npt.NDArray[np.int32], Arrays]


@dataclass(frozen=True)
class SizeClass:
    """Kernel, layout and workspace for native plans of batches of about one size.

    Attributes:
        choice: the choice of the tile.
        kernel: the kernel of this tile.
        site: layout and constants of the plans.
        size: size of the workspace.
        partition: how tiles are assigned.
    """

    choice: TileChoice
    kernel: Kernel
    site: Site
    size: WorkspaceSize
    partition: Partition

    @cached_property
    def has_roles(self) -> bool:
        """Whether its plans have two roles."""
        return self.partition.has_roles

    def suits(
        self, batch: Measured | OnDevice, choice: TileChoice, declared: Bounds | None
    ) -> bool:
        """True if a batch belongs here: any with declared bounds; else it must fill a quarter.

        Room is rounded up to powers of two, which lengths of serving steps cross back and forth.
        """
        if choice is not self.choice or declared is not None:
            return choice is self.choice
        room, least, sizes = self.site.room.bounds, self.least, batch.sizes
        return (
            least.max_requests <= sizes.num_requests <= room.max_requests
            and least.max_q_rows <= sizes.total_q_rows <= room.max_q_rows
            and least.max_kv_len <= sizes.max_kv_len <= room.max_kv_len
            and least.max_blocks <= sizes.num_blocks <= room.max_blocks
        )

    @cached_property
    def least(self) -> Bounds:
        """Smallest batch of the class without declared bounds: more than a quarter of the room."""
        room = self.site.room.bounds
        numbers = room.max_requests, room.max_q_rows, room.max_kv_len, room.max_blocks
        return Bounds(*((number >> 2) + 1 if number >> 2 else 0 for number in numbers))


Values = tuple[dict[str, Any], dict[str, Any]]  # scalars, and tensors that the host knows


def values_of(inputs: Inputs) -> Values:
    """A copy of the values that a plan is made with, which later plans and runs do not change."""
    return dict(inputs.scalars), dict(inputs.known)


class SizeClasses:
    """Size classes of one wrapper's native plans.

    Attributes:
        rules, memory: the wrapper's.
    """

    def __init__(self, rules: Rules, kernels: Kernels, memory: PlanMemory) -> None:
        self.rules, self.memory = rules, memory
        self._kernels = kernels
        self._last: SizeClass | None = None
        # Steps with and without a prefill alternate.
        self._of_choices: dict[tuple[int, Partition], list[SizeClass]] = {}

    def of(self, batch: Measured | OnDevice, choice: TileChoice) -> SizeClass:
        """The size class of a batch with a tile, made if there is none."""
        rules, declared = self.rules, self.rules.options.bounds
        partition = rules.partition(batch, choice.tile)
        key = id(choice), partition  # size classes keep choices alive, so ids are unique
        found = self._of_choices.get(key, [])
        for size_class in found:
            if size_class.suits(batch, choice, declared):
                break
        else:
            size_class = self._made(batch, choice, partition)
            if not found and len(self._of_choices) >= _KEPT:
                self._of_choices.clear()
        if not found or found[0] is not size_class:  # the last plan's class comes first
            others = [one for one in found if one is not size_class]
            self._of_choices[key] = [size_class, *others[: _SIZES - 1]]
        self._last = size_class
        return size_class

    def _made(
        self, batch: Measured | OnDevice, choice: TileChoice, partition: Partition
    ) -> SizeClass:
        rules, kernel = self.rules, self._kernels.get(choice)
        room, size = self.memory.fit(batch.least_bounds, kernel)
        longest_first = None
        if partition.deals:
            longest_first = LongestFirst(rules.piece_keys, rules.cached_keys)
        site = Site.of(
            rules.spec.kv_format, rules.heads, kernel.tile, room, rules.active_ctas(kernel),
            rules.prices(kernel), longest_first,
        )  # fmt: skip
        return SizeClass(choice, kernel, site, size, partition)

    def planned(
        self, batch: Measured | OnDevice, size_class: SizeClass, inputs: Inputs, by: str
    ) -> Planned:
        """Point kernels to the plan just written to the workspace, and describe it."""
        self.memory.point_to(size_class.site.room)
        return self.made(batch, size_class, values_of(inputs), by)

    def made(
        self, batch: Measured | OnDevice, size_class: SizeClass, values: Values, by: str
    ) -> Planned:
        """Like `planned`, but kernels already read plans of this size class."""
        captured = None
        if isinstance(batch, OnDevice) and is_capturing(self.rules.device):
            captured = batch.tensors
        read = partial(self._read, size_class, self.memory.number, captured, *values)
        choice, kernel, size = size_class.choice, size_class.kernel, size_class.size
        return Planned(batch, choice, kernel, size, by, read, is_native=True)

    def verify(self, planned: Planned, inputs: Inputs) -> None:
        """Read the last plan anew from memory, which may have lost a cached plan, and check it.

        Raises:
            PlanInvalid: what is wrong with it.
        """
        size_class = self._last
        assert size_class is not None  # a plan was made
        packed = self.memory.packed(size_class.site.room)
        check_header(packed, size_class.site.room, planned.by)
        known = dict(inputs.known)
        if isinstance(planned.batch, OnDevice):  # the mask was evaluated with device values
            known |= {name: _values(inputs.tensors[name]) for name in inputs.mask_tensors}
        scalars, number = dict(inputs.scalars), self.memory.number
        plan, visibility, _ = self._read(size_class, number, None, scalars, known)
        if int(plan.header["status"][0]) == GOOD:
            qo, kv, last, indices = (*planned.given, None, None)[:4]
            batch = make_batch(self.rules.spec.kv_format, qo, kv, indices, last)
            check_batch(plan, batch.segments, batch.indices, planned.by)
        verify_planned(plan, visibility, size_class.site.room, packed, planned.by)

    def _unpacked(
        self, size_class: SizeClass, number: int, captured: tuple[torch.Tensor | None, ...] | None
    ) -> _Unpacked:
        """The bytes of a plan in the workspace, and its batch.

        Args:
            size_class: the plan's layout.
            number: the plan's number.
            captured: the lengths on the device, if only replays of a CUDA graph make the plan.

        Raises:
            NotPlanned: the bytes are those of a later plan.
            NotReplayed: no replay has made the plan of these lengths.
            PlanMismatch: the bytes are those of another wrapper.
        """
        if number != self.memory.number:
            raise NotPlanned(what="another plan() has taken the place of the one asked for")
        self.memory.workspace.check_held()
        room, kv_format = size_class.site.room, self.rules.spec.kv_format
        packed = self.memory.packed(room)
        if captured is not None and not holds_plan_of(captured, packed, room, kv_format):
            raise NotReplayed
        segments, indices = unpack_batch(packed, room, kv_format.block_kv)
        return packed, Arrays(segments, indices, segments["q_len"], segments["kv_len"])

    def _read(
        self,
        size_class: SizeClass,
        number: int,
        captured: tuple[torch.Tensor | None, ...] | None,
        scalars: dict[str, Any],
        known: dict[str, Any],
    ) -> Read:
        """Read a plan, given the values that the mask read; see `_unpacked`."""
        packed, arrays = self._unpacked(size_class, number, captured)
        visibility = self.rules.visibility(arrays, scalars, known)
        problem = self.rules.problem(arrays.segments, size_class.kernel, visibility)
        problem = problem.assigned(size_class.partition)
        plan = unpack(packed, size_class.site.room, problem, arrays.indices)
        return Read(plan, visibility, arrays)


def _values(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor's values for the mask's analysis."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16
        tensor = tensor.float()
    values: npt.NDArray[Any] = tensor.cpu().numpy()
    return values
