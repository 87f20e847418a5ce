"""Plans of the composed format: prefixes found in the page table, parts chosen, sizes, checks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.masks.intervals import TileAnalysis
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.ir import walk
from warploom.dsl.types.spec import TracedVariant
from warploom.runtime.formats.batch import Batch
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.planning.fast_planner import FastPlanner
from warploom.runtime.planning.planner import Planned, Planner
from warploom.runtime.planning.verify_plans import composed_check, verify_planned
from warploom.runtime.planning.visibility import Heads, make_visibility
from warploom.scheduler.bounds import Bounds
from warploom.scheduler.capacity import Capacity, WorkspaceSize
from warploom.scheduler.composed import Machine, SharedBatch, make_composed_plan
from warploom.scheduler.composed_plan import composed_capacity
from warploom.scheduler.composed_tiles import VisibilityOf
from warploom.scheduler.fixed import Pieces
from warploom.scheduler.layout import Records
from warploom.scheduler.prefixes import PrefixForest, find_prefixes
from warploom.scheduler.visibility import Visibility

MAX_LEVELS = 4  # parts that a request reads where no bounds say another number
_OF_REQUEST = frozenset(("batch", "q_len", "kv_len"))


def depends_on_request(traced: TracedVariant) -> str | None:
    """Why keys and values look different to requests that share them, or None if they do not."""
    for hook in ("key_transform", "value_transform"):
        graph = traced.hooks.get(hook)
        if graph is not None:
            read = {str(found.attr) for found in walk(graph) if found.op == "var"} & _OF_REQUEST
            if read:
                differs = "differs" if len(read) == 1 else "differ"
                return f"{hook} reads {', '.join(sorted(read))}, which {differs} between requests"
    return None


def shared_prefixes(batch: Batch, traced: TracedVariant, page_size: int) -> PrefixForest:
    """What the requests of a paged batch share; nothing where keys depend on the request."""
    full_pages = batch.kv_lens.astype(np.int64) // page_size
    if depends_on_request(traced):
        full_pages[:] = 0
    begin = batch.segments["index_begin"].astype(np.int64)
    return find_prefixes(begin, batch.indices, full_pages, page_size)


def mean_rows(batch: Batch, forest: PrefixForest, group_size: int) -> float:
    """Fused rows that a key meets on average, if all that is shared is read together."""
    fused = batch.segments["num_q"].astype(np.int64) * group_size
    products = float((fused * batch.kv_lens).sum())
    requests = forest.sum_over_requests(np.ones(len(fused), np.int64))
    keys = float(batch.kv_lens.sum()) - float(((requests - 1) * forest.length).sum())
    return products / keys if products else 1.0


def visibility_of(
    traced: TracedVariant, analysis: TileAnalysis, batch: Batch, heads: Heads
) -> VisibilityOf:
    """The mask's answers for segments that a plan makes of the batch."""

    def answers(segments: Records) -> Visibility:
        return make_visibility(traced, analysis, replace(batch, segments=segments), heads)

    return answers


class ComposedPlanner(Planner):
    """Plans of one wrapper for batches whose requests share pages."""

    def __call__(self, batch: Batch, inputs: Inputs) -> Planned:
        """Plan a batch and enqueue its upload on the current stream; raises as `Planner` does."""
        shared = self._shared(batch)
        kernel = self._kernels.get(self._choice(batch, shared).tile)
        exact = Bounds.of(batch.segments, len(batch.indices))
        room, size = self._fit(replace(exact, max_levels=shared.levels), kernel)
        analysis = TileAnalysis(self._spec.variant, inputs.scalars, inputs.known)
        limit = self._options.sm_limit
        machine = Machine(
            num_kv_heads=self._heads.num_kv,
            rows=kernel.tile.rows,
            keys=kernel.tile.keys,
            num_ctas=kernel.num_ctas,
            active_ctas=kernel.num_ctas if limit is None else min(limit, kernel.num_ctas),
        )
        answers = visibility_of(self._spec.variant, analysis, batch, self._heads)
        plan = make_composed_plan(shared, machine, answers, batch.indices)
        plan.check_fits(room)
        self._workspace.fit(size)
        self._send(plan, room)
        return Planned(batch, plan, kernel, answers(batch.segments), size)

    def _verify(self, planned: Planned, inputs: Inputs) -> None:
        check = composed_check(planned.batch.segments, self._spec.kv_format.block_kv)
        room, packed = self._packed()
        verify_planned(planned.plan, planned.visibility, room, packed, planned.by, check)

    def choice_for(self, batch: Batch) -> TileChoice:
        """The tile of all plans, or the one for the rows that a key meets in this batch."""
        return self._choice(batch, self._shared(batch))

    def _choice(self, batch: Batch, shared: SharedBatch) -> TileChoice:
        fixed = self.fixed_choice()
        if fixed is not None:
            return fixed
        heads = self._heads

        def reads_with(rows: int) -> tuple[int, int, int]:
            keys, walked, tiles = (heads.num_kv * count for count in shared.reads(rows))
            return keys, walked, tiles

        cheapest = self._kernels.cheapest_composed(reads_with)
        if cheapest is not None:
            return cheapest
        return self._tiles.for_rows(mean_rows(batch, shared.forest, heads.group_size))

    def _shared(self, batch: Batch) -> SharedBatch:
        """The batch with its prefixes."""
        page_size, bounds = self._spec.kv_format.block_kv, self._options.bounds
        forest = shared_prefixes(batch, self._spec.variant, page_size)
        levels = min(forest.depth + 1, MAX_LEVELS if bounds is None else bounds.max_levels)
        return SharedBatch(batch.segments, forest, self._heads.group_size, page_size, levels)

    def _compute_sizes(
        self, bounds: Bounds, tile: TileConfig, num_ctas: int, pieces: Pieces | None
    ) -> tuple[Capacity, WorkspaceSize]:
        assert pieces is None, "prefixes are cut where they fit, not at multiples of one size"
        room = composed_capacity(
            bounds,
            rows=tile.rows,
            num_kv_heads=self._heads.num_kv,
            group_size=self._heads.group_size,
            num_ctas=num_ctas,
        )
        return room, room.workspace_size(self._spec.head_dim_v)


def planner_of(kv_format: KVFormat) -> type[Planner]:
    """The class that plans for a format."""
    return ComposedPlanner if kv_format.composed else FastPlanner
