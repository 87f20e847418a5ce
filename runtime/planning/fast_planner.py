"""Plans of wrappers by the native planners where these can, and by NumPy elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from warploom.codegen.source import TileConfig
from warploom.errors import BatchRefused, BoundsExceeded, NotPlanned
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Batch, Measured, OnDevice
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.kernels import Kernel
from warploom.runtime.planning.native_planner import NativePlanner, Site, device_lengths
from warploom.runtime.planning.plan_status import PlanStatus
from warploom.runtime.planning.planner import Planned, Planner
from warploom.runtime.planning.verify_plans import check_batch, check_header, verify_planned
from warploom.scheduler.bounds import Bounds
from warploom.scheduler.capacity import Capacity, WorkspaceSize
from warploom.scheduler.layout import HEADER
from warploom.scheduler.plan import Plan
from warploom.scheduler.problem import Problem
from warploom.scheduler.unpack import unpack, unpack_batch
from warploom.scheduler.visibility import Visibility


class ReadBack(Planned):
    """A plan that a native planner wrote; it is read from the device when first asked for.

    Only the last plan of a wrapper can be read; NotPlanned says that it is gone.
    """

    def __init__(
        self,
        batch: Batch,
        kernel: Kernel,
        size: WorkspaceSize,
        read: Callable[[], tuple[Plan, Visibility]],
        by: str,
    ) -> None:
        """Take what was planned; see `Planned`."""
        self.batch, self.kernel, self.size, self.by = batch, kernel, size, by
        self._read = read

    @property
    def given(self) -> tuple[Any, ...]:
        """The index arrays that `plan` was given: qo_indptr, kv_indptr, last_page_len, kv_indices.

        Ragged and dense storage has two of them.
        """
        batch = self.batch
        if isinstance(batch, OnDevice):
            return batch.tensors
        assert isinstance(batch, Measured)  # native planners plan no others
        return batch.lengths.kept

    @cached_property
    def _both(self) -> tuple[Plan, Visibility]:
        return self._read()

    @cached_property
    def plan(self) -> Plan:  # type: ignore[override]
        return self._both[0]

    @cached_property
    def visibility(self) -> Visibility:  # type: ignore[override]
        return self._both[1]


@dataclass(frozen=True)
class Place:
    """Where native plans of batches of about one size go.

    Attributes:
        tile: as it was chosen.
        kernel: made with it.
        site: of the plan.
        size: of the workspace.
    """

    tile: TileConfig
    kernel: Kernel
    site: Site
    size: WorkspaceSize

    def suits(self, batch: Measured | OnDevice, tile: TileConfig, declared: Bounds | None) -> bool:
        """True if a batch belongs here: any with declared bounds, else if it fills half."""
        if tile is not self.tile or declared is not None:
            return tile is self.tile
        room = self.site.room.bounds
        return (
            room.max_requests >> 1 < (batch.num_requests or 1) <= room.max_requests
            and room.max_q_rows >> 1 < (batch.total_q_rows or 1) <= room.max_q_rows
            and room.max_kv_len >> 1 < (batch.max_kv_len or 1) <= room.max_kv_len
            and room.max_blocks >> 1 < (batch.num_blocks or 1) <= room.max_blocks
        )


class FastPlanner(Planner):
    """Plans of one wrapper."""

    _place: Place | None = None  # of the last plan
    _only: Place | None = None  # of all plans, if bounds and tile are fixed
    _number = 0  # of the last plan

    @cached_property
    def _native(self) -> NativePlanner:
        spec = self._spec
        return NativePlanner(spec.variant, spec.kv_format, self._heads, self._device)

    @cached_property
    def _device_plans(self) -> bool:
        return self._device.type == "cuda" and not self._options.batch_invariant

    def __call__(self, batch: Batch, inputs: Inputs) -> Planned:
        """Plan a batch on the current stream; raises as `Planner` does."""
        self._number += 1
        if isinstance(batch, OnDevice):
            return self._plan_on_device(batch, inputs)
        if not isinstance(batch, Measured) or not self._native.knows(inputs):
            return super().__call__(batch, inputs)
        place = self._placed(batch)
        if place is None:
            return super().__call__(batch, inputs)
        self._workspace.fit(place.size)
        self._plan_natively(batch, inputs, place.site)
        return self._read_back(batch, place, inputs, "the host, natively")

    def _placed(self, batch: Measured | OnDevice) -> Place | None:
        """Where the plan of a batch goes; None if the batch is not dealt evenly."""
        if self._only is not None:
            return self._only
        declared, tile = self._options.bounds, self.tile_for(batch)
        if not self.deals_evenly(batch, tile):
            return None
        place = self._place
        if place is None or not place.suits(batch, tile, declared):
            kernel = self._kernels.get(tile)
            room, size = self._fit(batch.least_bounds, kernel)
            place = self._place = Place(tile, kernel, self._site(kernel, room), size)
        if declared is not None and self._options.fixed_tile:
            self._only = place
        return place

    def prepare(self) -> None:
        """Build the native planners."""
        if not self._options.batch_invariant:
            self._native.prepare(on_device=self._options.bounds is not None)

    def measure(self, arguments: tuple[Any, ...]) -> Measured | None:
        """Check plan arguments on the host, natively; None if `make_batch` must."""
        if self._options.batch_invariant:
            return None
        return self._native.measure(arguments, self._options.bounds)

    def lengths_on_device(self, arguments: tuple[Any, ...], q_rows: int | None) -> OnDevice | None:
        """The batch, if the device can plan it: lengths lie there, and bounds stand for them.

        Args:
            arguments: qo_indptr, kv_indptr, kv_indices and last_page_len.
            q_rows: rows that q will have; None: the most that the bounds allow.
        """
        bounds = self._options.bounds
        if bounds is None or not self._device_plans:
            return None
        tensors = device_lengths(arguments, self._spec.kv_format, self._device)
        if tensors is None:
            return None
        requests = len(arguments[0]) - 1
        rows = bounds.max_q_rows if q_rows is None else q_rows
        batch = OnDevice(tensors, requests, rows, bounds)
        tile = self.tile_for(batch)
        if tile.prepared_keys or not self.deals_evenly(batch, tile):
            return None
        if requests > min(bounds.max_requests, bounds.segments):
            name, most = "max_requests", min(bounds.max_requests, bounds.segments)
            raise BoundsExceeded(name=name, got=requests, bound=most)
        return batch

    def _plan_on_device(self, batch: OnDevice, inputs: Inputs) -> Planned:
        place = self._placed(batch)
        assert place is not None  # `lengths_on_device` has asked
        self._workspace.fit(place.size)
        address, votes = map(self._workspace.address, ("plan", "votes"))
        self._native.on_device(batch, inputs, place.site, address, votes)
        self._set_addresses(place.site.room)
        return self._read_back(batch, place, inputs, "the device")

    def _verify(self, planned: Planned, inputs: Inputs) -> None:
        """Native plans are read anew, so that nobody else finds one kept that memory has lost."""
        place = self._only or self._place
        if not isinstance(planned, ReadBack) or place is None:
            super()._verify(planned, inputs)
            return
        room, packed = self._packed()
        check_header(packed, room, planned.by)
        known = dict(inputs.known)
        if isinstance(planned.batch, OnDevice):  # which has asked the mask with values from there
            known |= {name: _on_host(inputs.tensors[name]) for name in inputs.mask_tensors}
        plan, visibility = self._read(place, self._number, dict(inputs.scalars), known)
        if int(plan.header["status"][0]) == PlanStatus.GOOD:
            qo, kv, last, indices = (*planned.given, None, None)[:4]
            batch = make_batch(self._spec.kv_format, qo, kv, indices, last)
            check_batch(plan, batch.segments, batch.indices, planned.by)
        verify_planned(plan, visibility, room, packed, planned.by)

    def check_status(self) -> None:
        """Raise BatchRefused if the device found something wrong; waits for the plan.

        PlanMismatch says that another wrapper has planned there since.
        """
        self._workspace.check_held()
        self._workspace.await_last()
        at = [name for name, _ in HEADER.fields].index("status")
        status = PlanStatus(int(self._workspace.plan_ints[at]))
        if status is not PlanStatus.GOOD:
            raise BatchRefused(reason=status.reason)

    def _site(self, kernel: Kernel, room: Capacity) -> Site:
        limit = self._options.sm_limit
        active = kernel.num_ctas if limit is None else min(limit, kernel.num_ctas)
        return self._native.site(kernel.tile, room, active)

    def _plan_natively(self, batch: Measured, inputs: Inputs, site: Site) -> None:
        target, count = self._workspace.plan_ints, batch.num_blocks
        used = site.room.offsets["indices"] + count
        if count and not batch.lengths.addresses[3]:  # page numbers on the device stay there
            used -= count
            target[used : used + count].copy_(batch.lengths.kept[3][:count])
        self._native.on_host(inputs, site, self._upload.stage(target).address)
        self._upload.send(used)
        self._set_addresses(site.room)

    def _read_back(
        self, batch: Measured | OnDevice, place: Place, inputs: Inputs, by: str
    ) -> ReadBack:
        """What was planned into the workspace just now."""
        number = self._number
        batch.arrays = lambda: self._unpacked(place, number)[1]
        read = partial(self._read, place, number, dict(inputs.scalars), dict(inputs.known))
        return ReadBack(batch, place.kernel, place.size, read, by)

    def _unpacked(self, place: Place, number: int) -> tuple[npt.NDArray[np.int32], Batch]:
        """The bytes of a plan in the workspace, and their batch.

        Raises:
            NotPlanned: they are those of a later plan.
            PlanMismatch: they are another wrapper's.
        """
        if number != self._number:
            raise NotPlanned(what="another plan() has taken the place of the one asked for")
        self._workspace.check_held()
        self._workspace.await_last()
        room = place.site.room
        packed: npt.NDArray[np.int32] = self._workspace.plan_ints[: room.total_ints].cpu().numpy()
        return packed, Batch.of(*unpack_batch(packed, room, self._spec.kv_format.block_kv))

    def _read(
        self, place: Place, number: int, scalars: dict[str, Any], known: dict[str, Any]
    ) -> tuple[Plan, Visibility]:
        """The plan with this number."""
        packed, batch = self._unpacked(place, number)
        room, tile, heads = place.site.room, place.kernel.tile, self._heads
        visibility = self._visibility(batch, scalars, known)
        problem = Problem(
            batch.segments, heads.num_kv, heads.group_size, tile.rows, tile.keys,
            place.kernel.num_ctas, place.site.active_ctas, visibility, even=True,
        )  # fmt: skip
        return unpack(packed, room, problem, batch.indices), visibility


def _on_host(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor's values for the mask's analysis."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # NumPy has none
        tensor = tensor.float()
    values: npt.NDArray[Any] = tensor.cpu().numpy()
    return values
