"""Planning by the native planners: on the host without a Python loop, or on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from warploom.codegen.build import build
from warploom.codegen.planner_source import OPTIONS, OUTPUTS, PlannerSpec, scratch_bytes
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import TracedVariant
from warploom.errors import ArgumentError, MissingInput
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.formats import format_of
from warploom.runtime.formats.batch import Measured, OnDevice
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.planning.device_planner import DevicePlanner, PlanSize
from warploom.runtime.planning.host_planner import HostPlanner, host_planner
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.tensors.index_arrays import is_index_tensor
from warploom.scheduler.bounds import Bounds
from warploom.scheduler.capacity import Capacity
from warploom.scheduler.cost import CostModel
from warploom.scheduler.even import FEW, SNAP, Grid
from warploom.scheduler.layout import c_structs


@dataclass(frozen=True)
class Site:
    """Where plans go, and for which kernel: all that they have in common.

    Attributes:
        room: layout of the plan.
        active_ctas: CTAs that may get work.
        numbers: SITE of `codegen.planner_source`.
        max_tiles: query tiles that batches within the room's bounds have.
        columns: CTAs of a line.
        scratch: bytes that a planner works in.
    """

    room: Capacity
    active_ctas: int
    numbers: tuple[int, ...]
    max_tiles: int
    columns: int
    scratch: int

    @cached_property
    def _at(self) -> dict[int, tuple[int, ...]]:
        return {}

    def outputs(self, address: int) -> tuple[int, ...]:
        """Addresses of the sections that OUTPUTS names."""
        if address not in self._at:  # few: those of a workspace, or of a ring of buffers
            self._at[address] = tuple(address + 4 * self.room.offsets[name] for name in OUTPUTS)
        return self._at[address]


class NativePlanner:
    """Native planners of one wrapper, made when first needed.

    Batches are those of dense, ragged or paged storage that are dealt evenly; others plan in NumPy,
    and so do those of one shared sequence.
    """

    def __init__(
        self, variant: TracedVariant, kv_format: KVFormat, heads: Heads, device: torch.device
    ) -> None:
        self._variant = variant
        self._format = kv_format
        self._stored = format_of(kv_format)
        self._heads = heads
        self._device = device
        self._host: HostPlanner | None = None
        self._has_host = self._stored.native_storage is not None
        # All of them stay: a CUDA graph may replay any.
        self._on_device: dict[PlanSize, DevicePlanner] = {}
        self._written: Site | None = None  # to the parameters of the host's

    def prepare(self, on_device: bool) -> None:
        """Build the planner for the host, and for the device if it will plan, too."""
        self._find_host()
        if on_device and self._device.type == "cuda" and self._stored.plans_on_device:
            source = PlannerSpec(self._variant).render("cuda", c_structs())
            build(source, cuda_facts(self._device.index).arch)

    def _find_host(self) -> HostPlanner | None:
        if self._has_host and self._host is None:
            self._host = host_planner(self._variant, self._format, self._heads.group_size)
            self._has_host = self._host is not None
        return self._host

    def site(self, tile: TileConfig, room: Capacity, active_ctas: int) -> Site:
        """Where plans go.

        Args:
            tile: of the kernel.
            room: layout of the plan.
            active_ctas: CTAs that may get work.
        """
        heads, requests = self._heads, room.bounds.max_requests
        grid, cost = Grid.of(active_ctas, heads.num_kv), CostModel.for_even(tile.rows, tile.keys)
        tiles = room.bounds.max_q_rows * heads.group_size // tile.rows + requests
        storage = self._stored.native_storage
        assert storage is not None  # others measure no batch, and no device plans them
        numbers = (
            storage, self._format.block_kv, requests, tiles,
            room.num_ctas, grid.lines, grid.heads, grid.columns, tile.rows, tile.keys,
            heads.group_size, heads.num_q, heads.num_kv,
            cost.fixed, cost.per_tile, cost.grain, cost.partial, FEW, SNAP,
        )  # fmt: skip
        scratch = scratch_bytes(tiles, requests, grid.columns)
        return Site(room, active_ctas, numbers, tiles, grid.columns, scratch)

    def measure(self, arguments: tuple[Any, ...], bounds: Bounds | None) -> Measured | None:
        """Check the plan arguments on the host; None if only `make_batch` can, or can say why not.

        Args:
            arguments: qo_indptr, kv_indptr, kv_indices and last_page_len.
            bounds: the largest batch, if declared.
        """
        host = self._host or self._find_host()
        return None if host is None else host.measure(arguments, bounds)

    def knows(self, inputs: Inputs) -> bool:
        """True if the host has the values of all that the mask reads."""
        if self._host is None:
            return False
        needed = self._host.params.inputs
        return not needed or needed.issubset((*inputs.scalars, *inputs.known))

    def on_host(self, inputs: Inputs, site: Site, address: int) -> None:
        """Write the plan of the batch that `measure` saw last to host memory.

        Args:
            inputs: known ones.
            site: the kernel, and a layout with room for the batch.
            address: where the plan begins.
        """
        host = self._host
        assert host is not None
        if site is not self._written:
            host.params.write_site(*site.numbers)
            host.reserve(site.scratch)
            self._written = site
        if host.params.inputs:
            host.params.write_inputs({**inputs.scalars, **inputs.known})
        host.plan(site.outputs(address))

    def on_device(
        self, batch: OnDevice, inputs: Inputs, site: Site, address: int, votes: int
    ) -> None:
        """Enqueue a planner kernel on the current stream.

        Args:
            batch: lengths on the device.
            inputs: all that the mask reads.
            site: the kernel and the layout.
            address: where the plan begins, on the device.
            votes: address of a zero there, which is zero again behind the kernel.

        Raises:
            ArgumentError: the bounds are too large for the planner's memory on the device.
            MissingInput: the mask reads a tensor that has no value yet.
        """
        bounds = batch.bounds
        planner = self._device_planner(bounds, site)
        values = {**inputs.scalars, **inputs.tensors}
        for name in sorted(planner.params.inputs - values.keys()):
            expected = "a value for plan(), which reads it on the device"
            raise MissingInput(variant=self._variant.name, name=name, expected=expected)
        inputs.fix(planner.params.inputs)
        listed = batch.tensors[3]
        blocks = min(bounds.max_blocks, 0 if listed is None else len(listed))
        rows = min(batch.q_rows, bounds.max_q_rows)
        params = planner.params
        params.write_inputs(values)
        params.write_lengths(*(0 if part is None else part.data_ptr() for part in batch.tensors))
        params.write_outputs(*site.outputs(address))
        params.write_batch(batch.num_requests, rows, bounds.max_kv_len, blocks)
        params.write_site(*site.numbers)
        params.set("votes", votes)
        planner.launch(torch.cuda.current_stream(self._device).cuda_stream)

    def _device_planner(self, bounds: Bounds, site: Site) -> DevicePlanner:
        items = site.max_tiles * self._heads.num_kv
        boundaries = OPTIONS * (site.columns + 1)
        size = PlanSize(site.scratch, site.max_tiles, boundaries, items, bounds.max_blocks)
        if size not in self._on_device:
            arch = cuda_facts(self._device.index).arch
            if site.scratch > arch.shared_per_cta - PlannerSpec.RESERVED:
                reason = (
                    f"allow {site.max_tiles} query tiles, for which the device needs "
                    f"{site.scratch} bytes of shared memory, of {arch.shared_per_cta}; declare "
                    "smaller ones, or give the lengths on the host"
                )
                raise ArgumentError(name="bounds", reason=reason)
            self._on_device[size] = DevicePlanner(self._variant, self._device, size)
        return self._on_device[size]


def device_lengths(
    arguments: tuple[Any, ...], kv_format: KVFormat, device: torch.device
) -> tuple[torch.Tensor | None, ...] | None:
    """qo_indptr, kv_indptr, last_page_len and kv_indices, if all of them lie on the device.

    Args:
        arguments: qo_indptr, kv_indptr, kv_indices and last_page_len, as `plan` was given them.
        kv_format: says which of them there must be.
        device: the wrapper's.
    """
    qo, kv, indices, last = arguments
    if type(qo) is torch.Tensor and qo.is_cpu:
        return None  # at once, for so it is in most plans
    stored = format_of(kv_format)
    if not stored.plans_on_device:
        return None
    needed = (qo, kv, last, indices) if stored.takes else (qo, kv)
    for value in needed:
        if not isinstance(value, torch.Tensor) or value.is_cpu or value.device != device:
            return None
        if not is_index_tensor(value):
            return None
    unwanted = not stored.takes and not (last is indices is None)
    fit = len(kv) == len(qo) >= 1 and (last is None or len(last) == len(qo) - 1)
    return None if unwanted or not fit else (qo, kv, last, indices)
