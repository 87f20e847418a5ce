"""Plans of the composed format: prefixes found in page tables, choice of parts, sizes, checks."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from warploom.codegen.attention.portable import STREAMED_ROWS
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.masks.intervals import TileAnalysis
from warploom.dsl.types.ir import walk
from warploom.dsl.types.spec import AttentionSpec, TracedVariant
from warploom.errors import ArgumentError
from warploom.runtime.formats.batch import Arrays, Batch, HostBatch, RoleSizes, RoleTiles
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.kernel_choice import KernelChoice
from warploom.runtime.launching.kernels import Kernel
from warploom.runtime.planning.rules import Options, Rules, as_fixed, smaller_roles
from warploom.runtime.planning.verify_plans import Check
from warploom.runtime.planning.visibility import Heads, make_visibility
from warploom.scheduler.composed.plan import ComposedPlan, composed_capacity
from warploom.scheduler.composed.planning import SharedBatch, make_composed_plan, tiles_of_roles
from warploom.scheduler.composed.prefixes import PrefixForest, find_prefixes
from warploom.scheduler.composed.tiles import VisibilityOf
from warploom.scheduler.composed.verify import verify_composed
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.layout import ROW_CODE, Records
from warploom.scheduler.model.roles import FIRST, Role
from warploom.scheduler.model.visibility import Visibility
from warploom.scheduler.partition.fixed import ChunkCounts
from warploom.scheduler.plans.capacity import Capacity
from warploom.scheduler.plans.plan import Plan

MAX_LEVELS = 4  # most parts that a request reads, unless bounds are declared
FEWEST_ROWS = STREAMED_ROWS + 1.0  # least fused rows for which a GPU tile is chosen
_OF_REQUEST = frozenset(("batch", "q_len", "kv_len"))


def depends_on_request(traced: TracedVariant) -> str | None:
    """Why keys and values, once transformed, depend on the reading request; None if they do not."""
    for hook in ("key_transform", "value_transform"):
        graph = traced.hooks.get(hook)
        if graph is not None:
            read = {str(found.attr) for found in walk(graph) if found.op == "var"} & _OF_REQUEST
            if read:
                differs = "differs" if len(read) == 1 else "differ"
                return f"{hook} reads {', '.join(sorted(read))}, which {differs} between requests"
    return None


def shared_prefixes(arrays: Arrays, traced: TracedVariant, page_size: int) -> PrefixForest:
    """Shared prefixes of a paged batch; none if transformed keys depend on the request."""
    full_pages = arrays.kv_lens.astype(np.int64) // page_size
    if depends_on_request(traced):
        full_pages[:] = 0
    begin = arrays.segments["index_begin"].astype(np.int64)
    return find_prefixes(begin, arrays.indices, full_pages, page_size)


def mean_rows(arrays: Arrays, forest: PrefixForest, group_size: int) -> float:
    """Mean fused rows per key, if all shared keys are read together."""
    fused = arrays.segments["num_q"].astype(np.int64) * group_size
    products = float((fused * arrays.kv_lens).sum())
    requests = forest.sum_over_requests(np.ones(len(fused), np.int64))
    keys = float(arrays.kv_lens.sum()) - float(((requests - 1) * forest.length).sum())
    return products / keys if products else 1.0


class ComposedRules(Rules):
    """Rules for batches whose requests share pages."""

    _last: tuple[HostBatch, SharedBatch] | None = None

    @cached_property
    def fixed(self) -> TileChoice | None:
        """The tile of all plans, or None if each batch chooses.

        Raises:
            ArgumentError: batch invariance was requested, or a tile of more than ROW_CODE rows.
        """
        options = self.options
        if options.batch_invariant:
            reason = "a composed plan merges states where other requests share a prefix"
            raise ArgumentError(name="batch_invariant", reason=reason)
        if options.tile is not None:
            return self._given(options.tile)
        if not options.fixed_tile or options.bounds is None:
            return None
        rows = options.bounds.max_q_rows * self.heads.group_size
        return as_fixed(self._for_rows(rows / max(1, options.bounds.segments)))

    def _given(self, tile: TileConfig) -> TileChoice:
        """The caller's tile, if composed plans support it."""
        if tile.rows > ROW_CODE:
            reason = f"has {tile.rows} rows; composed plans take {ROW_CODE} at most"
            raise ArgumentError(name="tile", reason=reason)
        return self._kernels.given(tile)

    def _choose(self, batch: Batch) -> TileChoice:
        """The cheapest tile by the cost model, else by the mean rows per key."""
        assert isinstance(batch, HostBatch)  # no native planner measures composed batches
        shared, heads = self._shared(batch), self.heads

        def reads_with(rows: int) -> tuple[int, int, int]:
            keys, walked, tiles = (heads.num_kv * count for count in shared.reads(rows))
            return keys, walked, tiles

        cheapest = self._kernels.cheapest_composed(reads_with)
        if cheapest is not None:
            return cheapest
        return self._for_rows(mean_rows(batch.arrays, shared.forest, heads.group_size))

    def _for_rows(self, rows: float) -> TileChoice:
        """The tile for this mean number of fused rows per key."""
        return self._kernels.choose(max(rows, self._fewest_rows))

    def _candidates(self) -> list[TileChoice]:
        mixed = [] if self.mixes is None else [mix.choice for mix in self.mixes.all]
        return [*self._kernels.composed_candidates(self._fewest_rows), *mixed]

    @property
    def _fewest_rows(self) -> float:
        """Least rows to choose a tile for. On a GPU this gives tiles of 64 rows or more where rows
        alone decide: tiles of 16 rows would read long prefixes of many rows again and again."""
        return FEWEST_ROWS if isinstance(self._kernels.target, Arch) else 1.0

    def _shared(self, batch: HostBatch) -> SharedBatch:
        """The batch with its prefixes."""
        if self._last is None or self._last[0] is not batch:
            page_size, bounds = self.spec.kv_format.block_kv, self.options.bounds
            forest = shared_prefixes(batch.arrays, self.spec.variant, page_size)
            levels = min(forest.depth + 1, MAX_LEVELS if bounds is None else bounds.max_levels)
            group = self.heads.group_size
            self._last = batch, SharedBatch(batch.segments, forest, group, page_size, levels)
        return self._last[1]

    def _room(
        self, bounds: Bounds, tile: TileConfig, num_ctas: int, chunks: ChunkCounts | None
    ) -> Capacity:
        return composed_capacity(
            bounds,
            rows=tile.rows,
            num_kv_heads=self.heads.num_kv,
            group_size=self.heads.group_size,
            num_ctas=num_ctas,
            num_roles=1 + len(smaller_roles(tile)),
        )

    def least_bounds(self, batch: HostBatch, tile: TileConfig) -> Bounds:
        _, parts, _ = self._shared(batch).cut(tile.rows)
        return replace(batch.least_bounds, max_levels=parts.levels)

    def role_tiles(self, batch: HostBatch, inputs: Inputs, sizes: RoleSizes) -> RoleTiles:
        roles = Role(FIRST, sizes.rows, sizes.keys), Role("", sizes.few_rows, sizes.decode_keys)
        answers = self._answers(batch, inputs)
        return RoleTiles(*tiles_of_roles(self._shared(batch), roles, answers))

    def _answers(self, batch: HostBatch, inputs: Inputs) -> VisibilityOf:
        """The mask's answers for given segments."""
        analysis = TileAnalysis(self.spec.variant, inputs.scalars, inputs.known)

        def answers(segments: Records) -> Visibility:
            arrays = batch.arrays._replace(segments=segments)
            return make_visibility(self.spec.variant, analysis, arrays, self.heads)

        return answers

    def make(self, batch: HostBatch, kernel: Kernel, inputs: Inputs) -> tuple[Plan, Visibility]:
        answers = self._answers(batch, inputs)
        problem = self.problem(batch.segments, kernel, answers(batch.segments))
        plan = make_composed_plan(self._shared(batch), problem, answers, batch.indices)
        return plan, problem.visibility

    def check_of(self, arrays: Arrays) -> Check:
        def check(plan: Plan, visibility: Visibility) -> None:
            assert isinstance(plan, ComposedPlan)
            verify_composed(plan, arrays.segments, visibility, self.spec.kv_format.block_kv)

        return check


def rules_of(
    spec: AttentionSpec,
    kernels: KernelChoice,
    heads: Heads,
    options: Options,
    device: torch.device,
) -> Rules:
    """The rules for the format of a declaration; see `Rules`."""
    rules = ComposedRules if spec.kv_format.composed else Rules
    return rules(spec, kernels, heads, options, device)
