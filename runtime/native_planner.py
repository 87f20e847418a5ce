"""Planning by the native planners: on the host without a Python loop, or on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from warploom.codegen.build import build
from warploom.codegen.planner_source import OPTIONS, OUTPUTS, planner_source, scratch_bytes
from warploom.codegen.source import TileConfig
from warploom.dsl.formats import Dense, KVFormat, Paged, Ragged
from warploom.dsl.spec import TracedVariant
from warploom.errors import ArgumentError, MissingInput
from warploom.runtime.batch import Measured, OnDevice
from warploom.runtime.device import cuda_facts
from warploom.runtime.device_planner import DevicePlanner, PlanSize
from warploom.runtime.host_planner import STORAGE, HostPlanner, host_planner, is_index_tensor
from warploom.runtime.inputs import Inputs
from warploom.runtime.visibility import Heads
from warploom.scheduler.bounds import INT32_MAX, Bounds
from warploom.scheduler.capacity import Capacity
from warploom.scheduler.cost import CostModel
from warploom.scheduler.even import FEW, SNAP, Grid
from warploom.scheduler.layout import c_structs


@dataclass(frozen=True)
class Site:
    """Where a plan goes, and for which kernel.

    Attributes:
        tile: sizes of the kernel's tiles.
        room: layout of the plan.
        active_ctas: CTAs that may get work.
    """

    tile: TileConfig
    room: Capacity
    active_ctas: int

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        return tuple(4 * self.room.offsets[name] for name in OUTPUTS)

    def outputs(self, address: int) -> tuple[int, ...]:
        """Addresses of header, cta_indptr, segments, merges, items and indices."""
        return tuple([address + offset for offset in self._offsets])


class NativePlanner:
    """Native planners of one wrapper, made when first needed.

    Batches are those of dense, ragged or paged storage that are dealt evenly; others plan in NumPy.
    """

    def __init__(
        self, variant: TracedVariant, kv_format: KVFormat, heads: Heads, device: torch.device
    ) -> None:
        self._variant = variant
        self._format = kv_format
        self._heads = heads
        self._device = device
        self._host: HostPlanner | None = None
        self._has_host = isinstance(kv_format, (Dense, Ragged, Paged))
        # All of them stay: a CUDA graph may replay any.
        self._on_device: dict[PlanSize, DevicePlanner] = {}
        self._grid_of: tuple[Site, tuple[int, ...]] | None = None

    def prepare(self, on_device: bool) -> None:
        """Build the planner for the host, and for the device if it will plan, too."""
        self._find_host()
        if on_device and self._device.type == "cuda":
            source = planner_source(self._variant, c_structs(), "cuda")
            build(source, cuda_facts(self._device.index).arch)

    def _find_host(self) -> HostPlanner | None:
        if self._has_host and self._host is None:
            self._host = host_planner(self._variant)
            self._has_host = self._host is not None
        return self._host

    def measure(self, arguments: tuple[Any, ...], bounds: Bounds | None) -> Measured | None:
        """Check the plan arguments on the host; None if only `make_batch` can, or can say why not.

        Args:
            arguments: qo_indptr, kv_indptr, kv_indices and last_page_len.
            bounds: the largest batch, if declared.
        """
        host = self._find_host()
        if host is None:
            return None
        return host.measure(self._format, arguments, self._heads.group_size, bounds)

    def knows(self, inputs: Inputs) -> bool:
        """True if the host has the values of all that the mask reads."""
        host = self._host
        return host is not None and all(
            name in inputs.scalars or name in inputs.known for name in host.params.inputs
        )

    def on_host(self, batch: Measured, inputs: Inputs, site: Site, address: int) -> None:
        """Write the plan of a batch to host memory.

        Args:
            batch: what `measure` gave.
            inputs: known ones.
            site: the kernel and the layout.
            address: where the plan begins.
        """
        host = self._host
        assert host is not None
        tiles = self._most_tiles(batch.total_q_rows, batch.num_requests, site.tile)
        limits = INT32_MAX, INT32_MAX, INT32_MAX, batch.num_requests, tiles
        host.params.write_inputs({**inputs.scalars, **inputs.known})
        qo, kv, last, indices = (array.address for array in batch.lengths)
        host.plan(
            (qo, kv, last, indices, *site.outputs(address)),
            self._numbers(batch.num_requests, limits, site),
            scratch_bytes(tiles, batch.num_requests, self._grid(site)[3]),
        )

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
        tiles = self._most_tiles(bounds.max_q_rows, bounds.max_requests, site.tile)
        listed = batch.tensors[3]
        blocks = min(bounds.max_blocks, 0 if listed is None else len(listed))
        rows = min(batch.q_rows, bounds.max_q_rows)
        limits = rows, bounds.max_kv_len, blocks, bounds.max_requests, tiles
        planner.params.write_inputs(values)
        pointers = (0 if tensor is None else tensor.data_ptr() for tensor in batch.tensors)
        planner.params.write(
            (*pointers, *site.outputs(address)), self._numbers(batch.num_requests, limits, site)
        )
        planner.params.set("votes", votes)
        planner.launch(torch.cuda.current_stream(self._device).cuda_stream)

    def _device_planner(self, bounds: Bounds, site: Site) -> DevicePlanner:
        tiles = self._most_tiles(bounds.max_q_rows, bounds.max_requests, site.tile)
        columns = self._grid(site)[3]
        scratch = scratch_bytes(tiles, bounds.max_requests, columns)
        size = PlanSize(
            scratch, tiles, OPTIONS * (columns + 1), tiles * self._heads.num_kv, bounds.max_blocks
        )
        if size not in self._on_device:
            arch = cuda_facts(self._device.index).arch
            if scratch > arch.shared_per_cta - DevicePlanner.RESERVED:
                reason = (
                    f"allow {tiles} query tiles, for which the device needs {scratch} bytes of "
                    f"shared memory, of {arch.shared_per_cta}; declare smaller ones, or give "
                    "the lengths on the host"
                )
                raise ArgumentError(name="bounds", reason=reason)
            self._on_device[size] = DevicePlanner(self._variant, self._device, size)
        return self._on_device[size]

    def _most_tiles(self, q_rows: int, requests: int, tile: TileConfig) -> int:
        return q_rows * self._heads.group_size // tile.rows + requests

    def _grid(self, site: Site) -> tuple[int, ...]:
        """Numbers of the planner from num_ctas on."""
        if self._grid_of is None or self._grid_of[0] is not site:
            heads, tile = self._heads, site.tile
            grid = Grid.of(site.active_ctas, heads.num_kv)
            cost = CostModel.for_even(tile.rows, tile.keys)
            numbers = (
                site.room.num_ctas, grid.lines, grid.heads, grid.columns, tile.rows, tile.keys,
                heads.group_size, heads.num_q, heads.num_kv,
                cost.fixed, cost.per_tile, cost.grain, cost.partial, FEW, SNAP,
            )  # fmt: skip
            self._grid_of = site, numbers
        return self._grid_of[1]

    def _numbers(self, requests: int, limits: tuple[int, ...], site: Site) -> tuple[int, ...]:
        storage = STORAGE[type(self._format).__name__]
        return (requests, storage, self._format.block_kv, *limits, *self._grid(site))


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
    if not isinstance(kv_format, (Ragged, Paged)):
        return None
    needed = (qo, kv, last, indices) if isinstance(kv_format, Paged) else (qo, kv)
    for value in needed:
        if not isinstance(value, torch.Tensor) or value.device != device:
            return None
        if not is_index_tensor(value):
            return None
    unwanted = isinstance(kv_format, Ragged) and not (last is indices is None)
    fit = len(kv) == len(qo) >= 1 and (last is None or len(last) == len(qo) - 1)
    return None if unwanted or not fit else (qo, kv, last, indices)
