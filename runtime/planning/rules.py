"""Rules for all plans of a wrapper: tiles, sizes, partition, and how NumPy makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch

from warploom.codegen.choice.role_cost import role_cost, role_cost_on_cpu
from warploom.codegen.source import TileChoice, TileConfig
from warploom.codegen.stamps import STAMP
from warploom.dsl.masks.intervals import TileAnalysis
from warploom.dsl.types.spec import AttentionSpec
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.formats import format_of
from warploom.runtime.formats.batch import Arrays, Batch, HostBatch, OnDevice, RoleSizes, RoleTiles
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.kernel_choice import KernelChoice
from warploom.runtime.launching.kernels import Kernel
from warploom.runtime.launching.pretransformed_keys import may_pretransform
from warploom.runtime.planning.mixes import Mixes, may_be_mixed, may_hold_prefills
from warploom.runtime.planning.verify_plans import Check
from warploom.runtime.planning.visibility import Heads, make_visibility
from warploom.scheduler.model.bounds import INT32_MAX, Bounds
from warploom.scheduler.model.cost import PIECE
from warploom.scheduler.model.layout import Records
from warploom.scheduler.model.problem import Partition, Problem, tiles_share_keys
from warploom.scheduler.model.roles import FIRST, Role, RolePrices
from warploom.scheduler.model.visibility import Visibility
from warploom.scheduler.partition.fixed import ChunkCounts
from warploom.scheduler.plans.capacity import Capacity, WorkspaceSize, capacity, workspace_size
from warploom.scheduler.plans.plan import Plan, make_plan
from warploom.scheduler.plans.verify import verify

_KEPT = 256  # cached sizes, and cached choices of tiles
INVARIANT_ROWS = 64.0  # fused rows for which a fixed tile is chosen without bounds
INVARIANT_SPLIT = 2048  # keys; chunks of this size keep a GPU busy from a few requests on
Grown = TypeVar("Grown", Bounds, ChunkCounts)


@dataclass(frozen=True)
class Options:
    """Choices of a wrapper that hold for all its plans.

    Attributes:
        bounds: the largest batch, if declared.
        fixed_tile: the tile must not depend on the batch.
        batch_invariant: neither the tile nor the split may depend on the batch.
        sm_limit: CTAs that may get work, or None for all.
        tile: the caller's choice of a tile.
        may_mix: batches may get two roles automatically.
        is_native: there are native planners for the format of the plans.
    """

    bounds: Bounds | None
    fixed_tile: bool
    batch_invariant: bool
    sm_limit: int | None
    tile: TileConfig | None
    may_mix: bool = False
    is_native: bool = True

    @property
    def may_plan_natively(self) -> bool:
        """Whether native planners can plan; they do not support fixed splits."""
        return self.is_native and not self.batch_invariant


class Rules:
    """Rules for the plans of one wrapper, or of one declaration, which needs tiles only.

    Attributes:
        spec, heads, options, device: the wrapper's. A declaration has no device.
        sizes: returns layout and workspace size for plans within given bounds, for a tile, a number
            of CTAs and, with fixed splits, numbers of chunks.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        kernels: KernelChoice,
        heads: Heads,
        options: Options,
        device: torch.device,
    ) -> None:
        """Choose nothing yet; tiles will be chosen among these kernels."""
        self.spec, self.heads, self.options, self.device = spec, heads, options, device
        self._kernels = kernels
        self._batched = format_of(spec.kv_format).batched
        self._chosen = lru_cache(_KEPT)(kernels.choose)
        self.sizes = lru_cache(_KEPT)(self._sizes)

    # Tiles

    def choices(self) -> list[TileChoice]:
        """Every choice that a plan can have."""
        return [self.fixed] if self.fixed else self._candidates()

    @cached_property
    def fixed(self) -> TileChoice | None:
        """The tile of all plans, or None if each batch chooses."""
        options, bounds = self.options, self.options.bounds
        if options.tile is not None:
            return self._kernels.given(options.tile)
        if not (options.fixed_tile or options.batch_invariant):
            return None
        if bounds is None:
            return as_fixed(self._kernels.choose(INVARIANT_ROWS, None, None))
        return as_fixed(self._mixed_within(bounds) or self._one_tile_within(bounds))

    def _one_tile_within(self, bounds: Bounds) -> TileChoice:
        """The tile for batches of the largest size and mean length within bounds."""
        mean = bounds.max_q_rows / max(1, bounds.segments)
        rows = max(1.0, mean) * self.heads.group_size  # at least one row per request
        items = bounds.segments * self.heads.num_kv
        return self._kernels.choose(rows, items, bounds.max_kv_len)

    def _mixed_within(self, bounds: Bounds) -> TileChoice | None:
        """The kernel of two roles that all batches within bounds get; None if they get one tile."""
        options, group_size = self.options, self.heads.group_size
        if not options.may_mix or not options.may_plan_natively or bounds.max_segments is not None:
            return None
        requests, rows, lanes = bounds.max_requests, bounds.max_q_rows, self.spec.head_dim_qk
        if not may_hold_prefills(requests, rows, group_size, lanes):
            return None
        for choice in self._kernels.of_roles(group_size):
            if smaller_roles(choice.tile)[0].rows >= group_size:  # else no request would decode
                return choice
        return None

    @property
    def always_has_roles(self) -> bool:
        """Whether all plans have two roles."""
        return self.fixed is not None and bool(self.fixed.tile.of_roles)

    def choice(self, batch: Batch, count: Callable[[RoleSizes], RoleTiles]) -> TileChoice:
        """The tile of all plans, or the tile for a batch.

        Args:
            batch: the batch.
            count: counts its key tiles of each role, with the values that the mask reads.
        """
        is_unread = isinstance(batch, OnDevice)
        group_size = self.heads.group_size
        if self.mixes is None or is_unread or not may_be_mixed(batch.sizes, group_size):
            return self.one_tile(batch)
        return self.mixes.choice(self.free_ctas, count) or self.one_tile(batch)

    def one_tile(self, batch: Batch) -> TileChoice:
        """The tile of all plans, or the tile of a batch without roles. Batches on a device get no
        roles, since the host does not read them and room for two roles depends on the batch."""
        return self.fixed or self._choose(batch)

    def role_tiles(self, batch: HostBatch, inputs: Inputs, sizes: RoleSizes) -> RoleTiles:
        """Key tiles of both roles in a batch."""
        visibility = self.visibility(batch.arrays, inputs.scalars, inputs.known)
        return RoleTiles.of(batch.segments, sizes, self.heads.group_size, visibility)

    @cached_property
    def mixes(self) -> Mixes | None:
        """Kernels of two roles for mixed batches; None if mixed batches get one tile, too.

        Bounds with no more rows than requests are for decodes only, which need no such kernel.
        """
        options, bounds = self.options, self.options.bounds
        if not options.may_mix or self.fixed is not None:
            return None
        if bounds is not None and bounds.max_q_rows <= bounds.segments:
            return None
        choices = self._kernels.of_roles(self.heads.group_size)
        return Mixes(self.spec, self.heads, choices) if choices else None

    @property
    def obstacle_to_roles(self) -> str | None:
        """Why no batch of these kernels gets two roles automatically, or None."""
        return self._kernels.obstacle_to_roles(self.heads.group_size)

    @property
    def pretransforms(self) -> bool:
        """Whether some batches have their keys transformed before attention."""
        return self._kernels.pretransforms

    @cached_property
    def free_ctas(self) -> int:
        """CTAs that may get work on a GPU with one CTA per SM."""
        sms = cuda_facts(self.device.index).num_sms
        return min(sms, self.options.sm_limit or sms)

    def _choose(self, batch: Batch) -> TileChoice:
        """The tile for the batch's number of segments, their mean fused rows, and its keys."""
        sizes = batch.sizes
        return self._chosen(
            sizes.busy_rows * self.heads.group_size,
            sizes.num_segments * self.heads.num_kv,
            1 << sizes.max_kv_len.bit_length(),  # else each decode step would choose anew
            self.pretransforms and may_pretransform(batch, self._batched, self.heads.num_kv),
        )

    def _candidates(self) -> list[TileChoice]:
        mixed = [] if self.mixes is None else [mix.choice for mix in self.mixes.all]
        return [*self._kernels.candidates(self.heads.group_size), *mixed]

    # Sizes

    def _sizes(
        self, bounds: Bounds, tile: TileConfig, num_ctas: int, chunks: ChunkCounts | None = None
    ) -> tuple[Capacity, WorkspaceSize]:
        room = self._room(bounds, tile, num_ctas, chunks)
        stamp_bytes = STAMP.itemsize if self.spec.stamps else 0
        return room, workspace_size(room, self.spec.head_dim_v, stamp_bytes)

    def _room(
        self, bounds: Bounds, tile: TileConfig, num_ctas: int, chunks: ChunkCounts | None
    ) -> Capacity:
        return capacity(
            bounds,
            rows=tile.rows,
            keys=tile.keys,
            num_kv_heads=self.heads.num_kv,
            group_size=self.heads.group_size,
            num_ctas=num_ctas,
            split_size=self._split_size,
            chunks=chunks,
            smaller=smaller_roles(tile),
        )

    def least_bounds(self, batch: HostBatch, tile: TileConfig) -> Bounds:
        """The smallest bounds that admit a batch with a tile."""
        return batch.least_bounds

    def chunks(self, batch: HostBatch, tile: TileConfig) -> ChunkCounts | None:
        """Chunk counts of a batch with fixed splits; None without."""
        size, heads = self._split_size, self.heads
        if size is None:
            return None
        roles = roles_of_tile(tile)
        return ChunkCounts.of(batch.segments, roles, heads.group_size, heads.num_kv, size)

    @property
    def _split_size(self) -> int | None:
        """Split size in keys, which each role rounds up to its key tile; None: no fixed splits."""
        return INVARIANT_SPLIT if self.options.batch_invariant else None

    # Plans

    def active_ctas(self, kernel: Kernel) -> int:
        """CTAs that may get work."""
        return min(self.options.sm_limit or kernel.num_ctas, kernel.num_ctas)

    def partition(self, batch: Batch, tile: TileConfig) -> Partition:
        """How tiles are assigned.

        With two roles hosts may deal prefills. A device leaves all on lines, since dealing has
        little for its threads to do side by side.

        With one tile: on lines if segments have few tiles, or if there are few tiles for the GPU's
        SMs. The order of tiles that share keys matters to the cache, so long prefills are assigned
        longest first, section by section; for decoding and appending a Stream-K partition is as
        good, and a device can make it. With at most half as many tiles as SMs every tile is cut,
        and the Stream-K partition cuts equal tiles of the same keys at the same places, so that all
        of them find the keys in the cache.
        """
        if self.options.batch_invariant:
            return Partition.FIXED
        if tile.decode is not None:
            return Partition.ROLES if isinstance(batch, OnDevice) else Partition.ROLES_DEALT
        if self._tiles_share_keys(batch, tile) and self._has_many_tiles(batch, tile):
            return Partition.LONGEST_FIRST
        return Partition.LINES

    def _tiles_share_keys(self, batch: Batch, tile: TileConfig) -> bool:
        fused = batch.sizes.segment_rows * self.heads.group_size
        return tiles_share_keys(fused, tile.rows, batch.sizes.num_segments)

    def _has_many_tiles(self, batch: Batch, tile: TileConfig) -> bool:
        """Whether there are more tiles than half of the SMs that may get work; true on a CPU."""
        if self.device.type != "cuda":
            return True
        sizes, sms = batch.sizes, cuda_facts(self.device.index).num_sms
        of_head = sizes.segment_rows * self.heads.group_size // tile.rows + sizes.num_segments
        return 2 * of_head * self.heads.num_kv > min(self.options.sm_limit or sms, sms)

    def _section_keys(self, batch: Batch, tile: TileConfig) -> int | None:
        """Keys of one head that half of the L2 holds, if several tiles read the same; else None."""
        if tile.of_roles or not self._tiles_share_keys(batch, tile):
            return None
        return None if self.partition(batch, tile) is Partition.LINES else self.cached_keys

    @cached_property
    def cached_keys(self) -> int | None:
        """Keys of one head that half of the L2 holds; None on a CPU."""
        if self.device.type != "cuda":
            return None
        key_bytes = (self.spec.head_dim_qk + self.spec.head_dim_v) * self.spec.stored_dtype.bytes
        return max(1, cuda_facts(self.device.index).l2_bytes // (2 * key_bytes))

    @property
    def piece_keys(self) -> int:
        """Cost of a partial result in keys, where tiles are assigned longest first.

        0 on a CPU, where threads take items of any list and merge in their caches.
        """
        return PIECE if self.device.type == "cuda" else 0

    def visibility(
        self, arrays: Arrays, scalars: Mapping[str, Any], known: Mapping[str, Any]
    ) -> Visibility:
        """The mask's answers for a batch, with the values of the mask's inputs."""
        traced, kv_format = self.spec.variant, self.spec.kv_format
        columns = kv_format.block_kv if kv_format.column_positions else 0
        analysis = TileAnalysis(traced, scalars, known)
        return make_visibility(traced, analysis, arrays, self.heads, columns)

    def make(self, batch: HostBatch, kernel: Kernel, inputs: Inputs) -> tuple[Plan, Visibility]:
        """A plan, and the mask's answers for it."""
        tile, visibility = kernel.tile, self.visibility(batch.arrays, inputs.scalars, inputs.known)
        problem = replace(
            self.problem(batch.segments, kernel, visibility),
            split_size=self._split_size,
            section_keys=self._section_keys(batch, tile),
        )
        problem = problem.assigned(self.partition(batch, tile))
        return make_plan(problem, batch.indices), visibility

    def problem(self, segments: Records, kernel: Kernel, visibility: Visibility) -> Problem:
        """The problem of a kernel, without the options of how tiles are cut."""
        tile, heads = kernel.tile, self.heads
        return Problem(
            segments, heads.num_kv, heads.group_size, tile.rows, tile.keys, kernel.num_ctas,
            self.active_ctas(kernel), visibility, smaller=smaller_roles(tile),
            prices=self.prices(kernel), piece_keys=self.piece_keys,
        )  # fmt: skip

    def prices(self, kernel: Kernel) -> RolePrices | None:
        """Prices of work of a kernel's two roles, for one of its CTAs; None for one role."""
        tile = kernel.tile
        if not tile.of_roles:
            return None
        on_gpu = self.device.type == "cuda"
        found = role_cost(self.spec, tile) if on_gpu else role_cost_on_cpu(tile)
        # CTAs per SM: if a limit leaves at most one CTA for each SM, every CTA has its own SM.
        sms = cuda_facts(self.device.index).num_sms if on_gpu else self.active_ctas(kernel)
        sharing = -(-self.active_ctas(kernel) // sms)
        tiles = sharing * found.prefill, sharing * found.decode
        saturating = min(INT32_MAX, sharing * found.saturating)
        roles = roles_of_tile(tile)
        may_deal = found.may_deal_beside_decodes
        return RolePrices.of_tiles(roles, tiles, saturating, self.cached_keys, may_deal)

    def check_of(self, arrays: Arrays) -> Check:
        """The check for a plan of this batch."""
        return verify


def roles_of_tile(tile: TileConfig) -> tuple[Role, ...]:
    """All roles of a tile, the one with the most rows first."""
    found = tile.of_roles or {FIRST: tile}
    return tuple(Role(name, own.rows, own.keys) for name, own in found.items())


def smaller_roles(tile: TileConfig) -> tuple[Role, ...]:
    """Roles of a tile beside the one with the most rows."""
    return roles_of_tile(tile)[1:]


def as_fixed(choice: TileChoice) -> TileChoice:
    """The choice for all batches."""
    return replace(choice, reason=f"fixed for all batches: {choice.reason}")


def grown(numbers: Grown) -> Grown:
    """Rounds up to powers of two, so that growing batches rarely move the workspace."""
    sizes = {field.name: int(getattr(numbers, field.name)) for field in fields(numbers)}
    return type(numbers)(
        **{name: min(INT32_MAX, 1 << max(0, n - 1).bit_length()) for name, n in sizes.items()}
    )
