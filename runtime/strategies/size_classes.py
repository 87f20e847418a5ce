"""Where native plans go, and how they are read back: what planners of host and device share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from warploom.codegen.planner_source import (
    OUTPUTS,
    list_scratch_bytes,
    role_scratch_bytes,
    scratch_bytes,
)
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.errors import NotPlanned, NotReplayed
from warploom.runtime.devices.graph import is_capturing
from warploom.runtime.formats import format_of, make_batch
from warploom.runtime.formats.batch import Arrays, Measured, OnDevice
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.kernels import Kernel, Kernels
from warploom.runtime.planning.memory import PlanMemory
from warploom.runtime.planning.plan_status import GOOD
from warploom.runtime.planning.rules import SHARING_TILES, Rules
from warploom.runtime.planning.verify_plans import (
    check_batch,
    check_header,
    holds_plan_of,
    verify_planned,
)
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies.strategy import Planned, Read
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.cost import CostModel
from warploom.scheduler.model.problem import TOLERANCE, WORTH_CUTTING, WORTH_SAVING
from warploom.scheduler.model.roles import MOST_CTAS, SLICES, RolePrices
from warploom.scheduler.partition.balance import TRIED
from warploom.scheduler.partition.role_lists import DECODES_SHARED, SHARED
from warploom.scheduler.partition.stream_k import FEW, IDLE, SNAP, Grid
from warploom.scheduler.plans.capacity import Capacity, WorkspaceSize
from warploom.scheduler.plans.unpack import unpack, unpack_batch

_KEPT = 16  # choices that have size classes
_SIZES = 4  # classes of a choice: making one takes longer than a plan
_MOST_LOAD = 2**47  # what `queued` of levelling.hpp leaves for loads, beside a CTA's number
_MOST_PRICE = 2**62  # what other planners count with
_MOST_SECTIONS = 2**31  # what `sort_by_section` leaves for their numbers, beside an item's
_LIST_NUMBERS = SHARING_TILES, TOLERANCE, WORTH_CUTTING, WORTH_SAVING, TRIED
_Unpacked: TypeAlias = tuple[npt.NDArray[np.int32], Arrays]


@dataclass(frozen=True)
class Lists:
    """Where tiles are assigned the longest first.

    Attributes:
        piece_keys: keys that a partial result is worth.
        cached_keys: keys of one head that the cache holds, or None: all.
    """

    piece_keys: int
    cached_keys: int | None


@dataclass(frozen=True)
class Site:
    """Where plans go, and for which kernel: all that they have in common.

    Attributes:
        room: layout of the plan.
        active_ctas: CTAs that may get work.
        numbers: `PlannerSpec.site` of `codegen.planner_source`.
        max_tiles: query tiles that batches within the room's bounds have.
        slices: CTAs of a line; of two roles, two for each CTA, for the threads of a device.
        scratch: bytes that a planner works in.
        is_counted: its CTAs and loads are numbers that compiled planners can count with.
    """

    room: Capacity
    active_ctas: int
    numbers: tuple[int, ...]
    max_tiles: int
    slices: int
    scratch: int
    is_counted: bool

    @classmethod
    def of(
        cls,
        kv_format: KVFormat,
        heads: Heads,
        tile: TileConfig,
        room: Capacity,
        active_ctas: int,
        prices: RolePrices | None = None,
        lists: Lists | None = None,
    ) -> Site:
        """That of a format with a `native_storage`, heads, and the tile of a kernel.

        Tiles of two roles have prices. Without `lists` lines of items are cut by Stream-K.
        """
        requests, storage = room.bounds.max_requests, format_of(kv_format).native_storage
        max_kv_len = room.bounds.max_kv_len
        assert storage is not None  # others measure no batch, and no device plans them
        grid = Grid.of(active_ctas, heads.num_kv)
        cost = CostModel.for_stream_k(tile.rows, tile.keys)
        if lists is not None:
            cost = CostModel.of(tile.rows, tile.keys, lists.piece_keys)
        tiles = room.bounds.max_q_rows * heads.group_size // tile.rows + requests
        numbers: tuple[int, ...] = (
            storage, kv_format.block_kv, requests, tiles,
            room.num_ctas, grid.lines, grid.heads, grid.slices, tile.rows, tile.keys,
            heads.group_size, heads.num_q, heads.num_kv,
            cost.fixed, cost.per_tile, cost.grain, cost.partial, FEW, SNAP,
        )  # fmt: skip
        if lists is not None:
            longest = cost.of_longest(max_kv_len, tile.keys)
            is_counted = room.num_ctas <= MOST_CTAS and tiles * heads.num_kv * longest < _MOST_LOAD
            if lists.cached_keys is not None:
                sections = requests * max_kv_len * heads.num_kv // lists.cached_keys
                is_counted = is_counted and sections < _MOST_SECTIONS
            scratch = list_scratch_bytes(tiles, requests, grid.slices, heads.num_kv, room.num_ctas)
            numbers += (active_ctas, lists.cached_keys or 0, *_LIST_NUMBERS)
            return cls(room, active_ctas, numbers, tiles, grid.slices, scratch, is_counted)
        if prices is None or tile.decode is None:
            # the length of all lines is multiplied by numbers of CTAs
            longest = cost.of_longest(max_kv_len, tile.keys)
            is_counted = tiles * heads.num_kv * longest * active_ctas < _MOST_PRICE
            scratch = scratch_bytes(tiles, requests, grid.slices)
            return cls(room, active_ctas, numbers, tiles, grid.slices, scratch, is_counted)
        more = _role_numbers(tile, active_ctas, prices)
        scratch = role_scratch_bytes(tiles, requests, active_ctas, SLICES)
        longest = sum(
            unit * CostModel.for_stream_k(role.rows, role.keys).of_longest(max_kv_len, role.keys)
            for role, unit in zip((tile, tile.decode), prices.units, strict=True)
        )
        # Prices of all items are multiplied by numbers of CTAs.
        is_counted = tiles * heads.num_kv * longest * active_ctas < _MOST_PRICE
        return cls(
            room, active_ctas, (*numbers, *more), tiles, 2 * active_ctas, scratch, is_counted
        )

    @cached_property
    def _at(self) -> dict[int, tuple[int, ...]]:
        return {}

    def outputs(self, address: int) -> tuple[int, ...]:
        """Addresses of the sections that OUTPUTS names."""
        if address not in self._at:  # few: those of a workspace, or of a ring of buffers
            self._at[address] = tuple(address + 4 * self.room.offsets[name] for name in OUTPUTS)
        return self._at[address]


def _role_numbers(tile: TileConfig, active_ctas: int, prices: RolePrices) -> tuple[int, ...]:
    """ROLE_SITE of `codegen.planner_source`."""
    decode, keys = tile.decode, tile.keys
    assert decode is not None  # it has two roles
    cost = CostModel.for_stream_k(decode.rows, decode.keys)
    return (
        active_ctas, decode.rows, decode.keys, cost.fixed, cost.per_tile, cost.grain, cost.partial,
        *prices.units, prices.saturating, SHARED, prices.cut_tiles(keys), IDLE, DECODES_SHARED,
        prices.least_claim(cost, decode.keys), prices.cached_keys or 0,
    )  # fmt: skip


@dataclass(frozen=True)
class SizeClass:
    """Where native plans of batches of about one size go.

    Attributes:
        choice: as it was made.
        kernel: of it.
        site: of the plan.
        size: of the workspace.
        lists: how tiles are assigned longest first; None where Stream-K partitions them.
    """

    choice: TileChoice
    kernel: Kernel
    site: Site
    size: WorkspaceSize
    lists: Lists | None = None

    @cached_property
    def has_roles(self) -> bool:
        """Whether its plans have two roles."""
        return self.kernel.tile.decode is not None

    def suits(
        self, batch: Measured | OnDevice, choice: TileChoice, declared: Bounds | None
    ) -> bool:
        """True if a batch belongs here: any with declared bounds, else if it fills a quarter.

        Room is for powers of two, and lengths of a serving step go back and forth over some.
        """
        if choice is not self.choice or declared is not None:
            return choice is self.choice
        room, sizes = self.site.room.bounds, batch.sizes
        return (
            room.max_requests >> 2 < (sizes.num_requests or 1) <= room.max_requests
            and room.max_q_rows >> 2 < (sizes.total_q_rows or 1) <= room.max_q_rows
            and room.max_kv_len >> 2 < (sizes.max_kv_len or 1) <= room.max_kv_len
            and room.max_blocks >> 2 < (sizes.num_blocks or 1) <= room.max_blocks
        )


class SizeClasses:
    """Native plans of one wrapper.

    Attributes:
        rules, memory: the wrapper's.
    """

    def __init__(self, rules: Rules, kernels: Kernels, memory: PlanMemory) -> None:
        self.rules, self.memory = rules, memory
        self._kernels = kernels
        self._last: SizeClass | None = None
        # steps with and without a prefill come in turn
        self._of_choices: dict[tuple[int, bool], list[SizeClass]] = {}

    def of(self, batch: Measured | OnDevice, choice: TileChoice) -> SizeClass:
        """Where the plan of a batch for a tile goes."""
        rules, declared = self.rules, self.rules.options.bounds
        stream_k = rules.uses_stream_k(batch, choice.tile)
        key = id(choice), stream_k  # classes keep their choices
        found = self._of_choices.get(key, [])
        for size_class in found:
            if size_class.suits(batch, choice, declared):
                break
        else:
            size_class = self._made(batch, choice, stream_k)
            if not found and len(self._of_choices) >= _KEPT:
                self._of_choices.clear()
            self._of_choices[key] = [size_class, *found[: _SIZES - 1]]
        self._last = size_class
        return size_class

    def _made(self, batch: Measured | OnDevice, choice: TileChoice, stream_k: bool) -> SizeClass:
        rules, kernel = self.rules, self._kernels.get(choice)
        room, size = self.memory.fit(batch.least_bounds, kernel)
        lists = None if stream_k else Lists(rules.piece_keys, rules.cached_keys)
        site = Site.of(
            rules.spec.kv_format, rules.heads, kernel.tile, room, rules.active_ctas(kernel),
            rules.prices(kernel.tile), lists,
        )  # fmt: skip
        return SizeClass(choice, kernel, site, size, lists)

    def planned(
        self, batch: Measured | OnDevice, size_class: SizeClass, inputs: Inputs, by: str
    ) -> Planned:
        """What was planned into the workspace just now."""
        self.memory.point_to(size_class.site.room)
        unpacked = partial(self._unpacked, size_class, self.memory.number)
        if isinstance(batch, OnDevice) and is_capturing(self.rules.device):
            unpacked = partial(unpacked, captured=batch.tensors)
        read = partial(self._read, size_class, unpacked, dict(inputs.scalars), dict(inputs.known))
        choice, kernel, size = size_class.choice, size_class.kernel, size_class.size
        return Planned(batch, choice, kernel, size, by, read, is_native=True)

    def verify(self, planned: Planned, inputs: Inputs) -> None:
        """Read the last plan anew, lest one is kept that memory has lost, and check it.

        Raises:
            PlanInvalid: what is wrong with it.
        """
        size_class = self._last
        assert size_class is not None  # there is a plan
        packed = self.memory.packed(size_class.site.room)
        check_header(packed, size_class.site.room, planned.by)
        known = dict(inputs.known)
        if isinstance(planned.batch, OnDevice):  # which has asked the mask with values from there
            known |= {name: _values(inputs.tensors[name]) for name in inputs.mask_tensors}
        unpacked = partial(self._unpacked, size_class, self.memory.number)
        plan, visibility, _ = self._read(size_class, unpacked, dict(inputs.scalars), known)
        if int(plan.header["status"][0]) == GOOD:
            qo, kv, last, indices = (*planned.given, None, None)[:4]
            batch = make_batch(self.rules.spec.kv_format, qo, kv, indices, last)
            check_batch(plan, batch.segments, batch.indices, planned.by)
        verify_planned(plan, visibility, size_class.site.room, packed, planned.by)

    def _unpacked(
        self,
        size_class: SizeClass,
        number: int,
        captured: tuple[torch.Tensor | None, ...] | None = None,
    ) -> _Unpacked:
        """The bytes of a plan in the workspace, and their batch.

        Args:
            size_class: where it lies.
            number: which plan it is.
            captured: the lengths on the device, if only replays of a CUDA graph make the plan.

        Raises:
            NotPlanned: they are those of a later plan.
            NotReplayed: no replay has made the plan of these lengths.
            PlanMismatch: they are another wrapper's.
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
        unpacked: Callable[[], _Unpacked],
        scalars: dict[str, Any],
        known: dict[str, Any],
    ) -> Read:
        """The plan that was unpacked."""
        packed, arrays = unpacked()
        visibility = self.rules.visibility(arrays, scalars, known)
        problem = self.rules.problem(arrays.segments, size_class.kernel, visibility)
        problem = replace(problem, stream_k=size_class.lists is None)
        plan = unpack(packed, size_class.site.room, problem, arrays.indices)
        return Read(plan, visibility, arrays)


def _values(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor's values for the mask's analysis."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # NumPy has none
        tensor = tensor.float()
    values: npt.NDArray[Any] = tensor.cpu().numpy()
    return values
