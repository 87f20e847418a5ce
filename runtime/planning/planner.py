"""From a batch to a plan on the device: tile, kernel, sizes, visibility, work list, upload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.masks.intervals import TileAnalysis
from warploom.dsl.types.spec import AttentionSpec
from warploom.env import verify_plans
from warploom.errors import WorkspaceTooSmall
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.devices.graph import is_capturing
from warploom.runtime.devices.params import ParamBlock
from warploom.runtime.devices.upload import Upload
from warploom.runtime.devices.workspace import Workspace
from warploom.runtime.formats import format_of
from warploom.runtime.formats.batch import Batch
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.kernels import Kernel, Kernels
from warploom.runtime.launching.prepared_keys import may_prepare
from warploom.runtime.planning.plan_tiles import Options, tiles_of
from warploom.runtime.planning.verify_plans import verify_planned
from warploom.runtime.planning.visibility import Heads, make_visibility
from warploom.scheduler.bounds import INT32_MAX, Bounds
from warploom.scheduler.capacity import Capacity, WorkspaceSize, capacity, workspace_size
from warploom.scheduler.fixed import Pieces
from warploom.scheduler.plan import Plan, make_plan
from warploom.scheduler.visibility import Visibility

_SIZES_KEPT = 256
INVARIANT_SPLIT = 2048  # keys; chunks of this size keep a GPU busy from a few requests on
# Tiles per segment from which on they are dealt in the order of their keys. All of them read the
# same keys, and fewer leave the cache too little to share for that to decide the order.
SHARING_TILES = 4


@dataclass  # not frozen, for a heir that sets what it knows
class Planned:
    """One plan that lies on the device.

    Attributes:
        by: who planned, for `explain()`.
    """

    batch: Batch
    plan: Plan
    kernel: Kernel
    visibility: Visibility
    size: WorkspaceSize
    by: str = "NumPy"


class Planner:
    """Plans of one wrapper.

    Attributes:
        verifies: every plan is to be checked, by `verify`.
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
        self._spec = spec
        self._heads = heads
        self._batched = format_of(spec.kv_format).batched
        self._kernels = kernels
        self._workspace = workspace
        self._params = params
        self._options = options
        self._tiles = tiles_of(spec.kv_format)(kernels, heads, options)
        self._device = device
        self.verifies = verify_plans()
        self._upload = Upload(device)
        self._addressed: torch.Tensor | None = None  # what the kernel's parameters point to
        self._room: Capacity | None = None  # ... and how that is laid out
        self._fixed: TileChoice | None = None  # once known, where all plans have the same
        self._chosen: dict[tuple[float, int, int, bool], TileChoice] = {}
        self._sizes: dict[
            tuple[Bounds, TileConfig, Pieces | None], tuple[Capacity, WorkspaceSize]
        ] = {}

    def fixed_choice(self) -> TileChoice | None:
        """The tile of all plans, or None if each batch chooses."""
        return self._tiles.fixed()

    def tiles(self) -> list[TileConfig]:
        """Every tile that a plan can have."""
        return self._tiles.all()

    def tile_for(self, batch: Batch) -> TileConfig:
        """The tile for a batch."""
        return self.choice_for(batch).tile

    def choice_for(self, batch: Batch) -> TileChoice:
        """Its choice: fixed, or by its segments and their mean number of fused rows."""
        if self._options.fixed_tile and self._fixed is None:
            self._fixed = self.fixed_choice()
        fixed = self._fixed or self.fixed_choice()
        if fixed is not None:
            return fixed
        key = (
            batch.busy_rows * self._heads.group_size,
            batch.num_segments * self._heads.num_kv,
            1 << batch.max_kv_len.bit_length(),  # or each step of decoding would choose anew
            self._kernels.prepares and may_prepare(batch, self._batched, self._heads.num_kv),
        )
        if key not in self._chosen:
            if len(self._chosen) > _SIZES_KEPT:
                self._chosen.clear()
            self._chosen[key] = self._kernels.choose(*key)
        return self._chosen[key]

    def sizes(
        self, bounds: Bounds, kernel: Kernel, pieces: Pieces | None = None
    ) -> tuple[Capacity, WorkspaceSize]:
        """Exact sizes of everything that batches within the bounds need, cut into these pieces."""
        key = bounds, kernel.tile, pieces
        if key not in self._sizes:
            if len(self._sizes) > _SIZES_KEPT:
                self._sizes.clear()
            self._sizes[key] = self._compute_sizes(bounds, kernel.tile, kernel.num_ctas, pieces)
        return self._sizes[key]

    def _compute_sizes(
        self, bounds: Bounds, tile: TileConfig, num_ctas: int, pieces: Pieces | None
    ) -> tuple[Capacity, WorkspaceSize]:
        common: dict[str, Any] = {
            "rows": tile.rows,
            "keys": tile.keys,
            "num_kv_heads": self._heads.num_kv,
            "group_size": self._heads.group_size,
            "num_ctas": num_ctas,
            "split_size": self._split_size(tile),
            "pieces": pieces,
        }
        dim = self._spec.head_dim_v
        return capacity(bounds, **common), workspace_size(bounds, head_dim_v=dim, **common)

    def largest_size(self, bounds: Bounds) -> WorkspaceSize:
        """The largest of the sizes that the tiles to choose from need."""
        sizes = [self.sizes(bounds, self._kernels.get(tile))[1] for tile in self.tiles()]
        return max(sizes, key=lambda size: size.total)

    def reserve(self) -> None:
        """Build the kernel and lay the workspace out, if the bounds fix both.

        Raises:
            WorkspaceTooSmall: the caller's memory cannot hold all batches within the bounds.
        """
        fixed, bounds = self.fixed_choice(), self._options.bounds
        if fixed is not None:
            kernel = self._kernels.get(fixed.tile)
            if bounds is not None:
                self._workspace.fit(self.sizes(bounds, kernel)[1])
        elif bounds is not None and self._workspace.is_given:
            self._workspace.check(self._known_size(bounds))

    def _known_size(self, bounds: Bounds) -> WorkspaceSize:
        """`largest_size` before kernels are built; on a GPU they may ask for more."""
        least = self._kernels.least_ctas
        sizes = [self._compute_sizes(bounds, tile, least, None)[1] for tile in self.tiles()]
        return max(sizes, key=lambda size: size.total)

    def __call__(self, batch: Batch, inputs: Inputs) -> Planned:
        """Plan a batch and enqueue its upload on the current stream.

        Raises:
            BoundsExceeded, WorkspaceTooSmall, ArgumentError: the batch does not fit; the plan
                before stays as it was.
            CompileError and others of `Kernels.get`.
        """
        kernel = self._kernels.get(self.tile_for(batch))
        pieces = self._pieces(batch, kernel.tile)
        room, size = self._fit(batch.least_bounds, kernel, pieces)
        visibility = self._visibility(batch, inputs.scalars, inputs.known)
        plan = make_plan(
            batch.segments,
            num_kv_heads=self._heads.num_kv,
            group_size=self._heads.group_size,
            rows=kernel.tile.rows,
            keys=kernel.tile.keys,
            num_ctas=kernel.num_ctas,
            visibility=visibility,
            capacity=room,
            sm_limit=self._options.sm_limit,
            split_size=self._split_size(kernel.tile),
            section_keys=self._section_keys(batch, kernel.tile),
            even=self.deals_evenly(batch, kernel.tile),
            indices=batch.indices,
        )
        self._workspace.fit(size)
        self._send(plan, room)
        return Planned(batch, plan, kernel, visibility, size)

    def prepare(self) -> None:
        """Build what planning needs, so that no plan has to."""

    def measure(self, arguments: tuple[Any, ...]) -> Batch | None:
        """Check plan arguments faster than `make_batch` does; None if only that can."""
        return None

    def lengths_on_device(self, arguments: tuple[Any, ...], q_rows: int | None) -> Batch | None:
        """The batch of plan arguments from which the device plans; None if the host must."""
        return None

    def check_status(self) -> None:
        """Raise BatchRefused if a device refused the last plan."""

    def verify(self, planned: Planned, inputs: Inputs) -> None:
        """Check the last plan, unless a graph is being captured, which will make it later.

        Args:
            planned: the plan.
            inputs: with which it was planned.

        Raises:
            PlanInvalid: what is wrong with it.
        """
        if not is_capturing(self._device):
            self._verify(planned, inputs)

    def _verify(self, planned: Planned, inputs: Inputs) -> None:
        room, packed = self._packed()
        verify_planned(planned.plan, planned.visibility, room, packed, planned.by)

    def _packed(self) -> tuple[Capacity, npt.NDArray[np.int32]]:
        """The last plan as it lies in memory, and its layout."""
        assert self._room is not None  # there is a plan
        self._workspace.await_last()
        return self._room, self._workspace.plan_ints[: self._room.total_ints].cpu().numpy()

    def _visibility(
        self, batch: Batch, scalars: Mapping[str, Any], known: Mapping[str, Any]
    ) -> Visibility:
        kv_format = self._spec.kv_format
        columns = kv_format.block_kv if kv_format.column_positions else 0
        traced = self._spec.variant
        analysis = TileAnalysis(traced, scalars, known)
        return make_visibility(traced, analysis, batch, self._heads, columns)

    def _fit(
        self, exact: Bounds, kernel: Kernel, pieces: Pieces | None = None
    ) -> tuple[Capacity, WorkspaceSize]:
        """Sizes for the declared bounds, or else for the batch's own and some larger ones."""
        bounds = self._options.bounds
        if bounds is not None:
            return self.sizes(bounds, kernel)
        try:
            room, size = self.sizes(_roomy(exact), kernel, _roomy_pieces(pieces))
            self._workspace.check(size)
        except WorkspaceTooSmall:  # the caller's memory; it may still hold this very batch
            room, size = self.sizes(exact, kernel, pieces)
            self._workspace.check(size)
        return room, size

    def _pieces(self, batch: Batch, tile: TileConfig) -> Pieces | None:
        """What the batch is cut into, if it is cut at multiples of one size."""
        size = self._split_size(tile)
        if size is None:
            return None
        heads = self._heads
        return Pieces.of(batch.segments, tile.rows, heads.group_size, heads.num_kv, size)

    def _split_size(self, tile: TileConfig) -> int | None:
        if not self._options.batch_invariant:
            return None
        return -(-INVARIANT_SPLIT // tile.keys) * tile.keys

    def deals_evenly(self, batch: Batch, tile: TileConfig) -> bool:
        """True if segments have few tiles, or the GPU: by the declared bounds, or by the batch.

        The order of tiles that share keys matters to the cache, so long prefills are dealt longest
        first, section by section; for decoding and appending an even cut is as good, and a device
        can make it. Where tiles are too few for half of the SMs each is cut, and even dealing cuts
        equal tiles of the same keys at the same places, so that the cache has them for all.
        """
        if self._options.batch_invariant:
            return False
        bounds = self._options.bounds
        if bounds is None:
            rows, segments = batch.segment_rows, batch.num_segments
        else:
            rows, segments = bounds.max_q_rows, bounds.segments
        fused = rows * self._heads.group_size
        if fused < SHARING_TILES * tile.rows * segments:
            return True
        if self._device.type != "cuda":
            return False
        sms, limit = cuda_facts(self._device.index).num_sms, self._options.sm_limit
        tiles = (fused // tile.rows + segments) * self._heads.num_kv
        return 2 * tiles <= (sms if limit is None else min(sms, limit))

    def _section_keys(self, batch: Batch, tile: TileConfig) -> int | None:
        """Keys of one head that half of the L2 holds, where several tiles read the same keys."""
        if self._device.type != "cuda" or self.deals_evenly(batch, tile):
            return None
        rows = batch.segment_rows * self._heads.group_size
        if rows < SHARING_TILES * tile.rows * batch.num_segments:
            return None
        dims = self._spec.head_dim_qk + self._spec.head_dim_v
        return max(
            1, cuda_facts(self._device.index).l2_bytes // (2 * dims * self._spec.stored_dtype.bytes)
        )

    def _send(self, plan: Plan, room: Capacity) -> None:
        target = self._workspace.plan_ints
        plan.pack(room, self._upload.stage(target).buffer[: len(target)].numpy())
        self._upload.send(room.offsets["indices"] + len(plan.indices))
        self._set_addresses(room)

    def _set_addresses(self, room: Capacity) -> None:
        target = self._workspace.plan_ints  # another tensor in each layout of the workspace
        if target is self._addressed and room is self._room:
            return
        self._addressed, self._room = target, room
        begin = self._workspace.address("plan")
        for section, offset in room.offsets.items():
            self._params.set(section, begin + 4 * offset)
        for part in ("partial_o", "partial_state", "arrivals"):
            if part not in room.offsets:
                self._params.set(part, self._workspace.address(part))


def _roomy(bounds: Bounds) -> Bounds:
    """Bounds rounded up to powers of two, so that growing batches rarely move the workspace."""
    return Bounds(**_grown(bounds))


def _roomy_pieces(pieces: Pieces | None) -> Pieces | None:
    """Likewise."""
    return None if pieces is None else Pieces(**_grown(pieces))


def _grown(numbers: Bounds | Pieces) -> dict[str, int]:
    return {
        field.name: min(INT32_MAX, 1 << max(0, int(getattr(numbers, field.name)) - 1).bit_length())
        for field in fields(numbers)
    }
