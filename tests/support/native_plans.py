"""Batches to plan, and both planners of a host for one batch: NumPy's and the native one."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import warploom as wl
from support.problems import plan_of
from warploom.codegen.source import TileConfig
from warploom.dsl.masks.intervals import TileAnalysis
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import TracedVariant
from warploom.dsl.variants.trace import trace
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Arguments
from warploom.runtime.planning.rules import smaller_roles
from warploom.runtime.planning.visibility import Heads, make_visibility
from warploom.runtime.strategies.host_strategy import HostPlanner
from warploom.runtime.strategies.site import LongestFirst, Site
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.constants import SHARING_TILES
from warploom.scheduler.model.roles import RolePrices
from warploom.scheduler.plans.plan import Plan
from warploom.scheduler.plans.verify import verify

UNTOUCHED = -7


class ByHead(wl.Variant):
    """Each key/value head sees a window of its own."""

    def logits_mask(self, at: Any) -> Any:
        return (at.kv_pos <= at.q_pos) & (at.q_pos - at.kv_pos < 100 * (at.kv_head + 1))


class Sinks(wl.Variant):
    """The first keys and the last ones, so that holes lie between."""

    def logits_mask(self, at: Any) -> Any:
        return (at.kv_pos <= at.q_pos) & ((at.kv_pos < 40) | (at.q_pos - at.kv_pos < 300))


VARIANTS: dict[str, Any] = {
    "all": wl.Variant(),
    "causal": wl.Causal(),
    "window": wl.Causal() & wl.SlidingWindow(500),
    "by head": ByHead(),
    "sinks": Sinks(),
    "prefix": wl.PrefixLM(),
}
TRACED: dict[str, TracedVariant] = {name: trace(variant) for name, variant in VARIANTS.items()}


TILES = [
    TileConfig(16, 32), TileConfig(64, 64), TileConfig(12, 256),
    TileConfig(64, 64, decode=TileConfig(16, 32)), TileConfig(128, 128, decode=TileConfig(16, 128)),
    TileConfig(24, 32, decode=TileConfig(4, 256)),
]  # fmt: skip


def page_table(kv_lens: Any, page: int, rng: Any) -> tuple[Any, ...]:
    pages = -(-kv_lens // page)
    indptr = np.concatenate(([0], np.cumsum(pages))).astype(np.int32)
    last = np.where(kv_lens > 0, (kv_lens - 1) % page + 1, 0).astype(np.int32)
    return indptr, rng.permutation(int(indptr[-1])).astype(np.int32), last


def draw_lengths(data: st.DataObject) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    size = data.draw(st.one_of(st.integers(0, 5), st.integers(0, 300)), label="requests")
    longest = data.draw(st.sampled_from([1, 60, 900, 20_000]), label="longest")
    kind = data.draw(st.sampled_from(["equal", "even", "zipf", "giants"]), label="lengths")
    kv_lens = {
        "equal": np.full(size, longest),
        "even": rng.integers(0, longest + 1, size),
        "zipf": np.minimum(rng.zipf(1.5, size) * 16, longest),
        "giants": np.where(rng.random(size) < 0.1, longest, rng.integers(0, 70, size)),
    }[kind]
    rows = data.draw(st.sampled_from([1, 1, 4, 40]), label="rows")
    q_lens = rng.integers(0, rows + 1, size) if rows > 1 else np.ones(size, int)
    if size and data.draw(st.booleans(), label="a chunk"):
        q_lens[rng.integers(size)] = rng.integers(1, 700)
    return q_lens, kv_lens, rng


def draw_arguments(
    data: st.DataObject, kv_format: KVFormat, fewest: int = 0
) -> tuple[tuple[Any, ...], Any]:
    """Of `plan`, and lengths of keys; requests with rows have so many at least."""
    q_lens, kv_lens, rng = draw_lengths(data)
    q_lens = np.where(q_lens > 0, np.maximum(q_lens, fewest), 0)
    if isinstance(kv_format, wl.Dense):
        q_lens = np.full(len(q_lens), max(q_lens, default=1))
    qo = np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32)
    if isinstance(kv_format, wl.Paged):
        indptr, indices, last = page_table(kv_lens, kv_format.page_size, rng)
        return (qo, indptr, indices, last), kv_lens
    return (qo, np.concatenate(([0], np.cumsum(kv_lens))).astype(np.int32), None, None), kv_lens


class Planners:
    """NumPy's planner and the native one, for one batch."""

    def __init__(
        self,
        name: str,
        kv_format: KVFormat,
        heads: Heads,
        inputs: Any,
        has_roles: bool = False,
        longest_first: LongestFirst | None = None,
    ) -> None:
        self.traced, self.format, self.heads, self.inputs = TRACED[name], kv_format, heads, inputs
        self.longest_first = longest_first
        self.native = HostPlanner(
            self.traced, kv_format, heads, has_roles, longest_first=longest_first is not None
        )

    def numpy_plan(
        self,
        arguments: tuple[Any, ...],
        tile: TileConfig,
        site: Site,
        prices: RolePrices | None = None,
    ) -> tuple[Plan, Any]:
        batch = make_batch(self.format, *arguments)
        analysis = TileAnalysis(self.traced, self.inputs.scalars, self.inputs.known)
        visibility = make_visibility(self.traced, analysis, batch.arrays, self.heads)
        longest_first = self.longest_first
        plan = plan_of(
            batch.segments, num_kv_heads=self.heads.num_kv, group_size=self.heads.group_size,
            rows=tile.rows, keys=tile.keys, num_ctas=site.room.num_ctas,
            visibility=visibility, capacity=site.room, sm_limit=site.active_ctas,
            stream_k=longest_first is None and tile.decode is None,
            may_deal=longest_first is not None, section_keys=self.section_keys(batch, tile),
            indices=batch.indices, smaller=smaller_roles(tile), prices=prices,
            piece_keys=0 if longest_first is None else longest_first.piece_keys,
        )  # fmt: skip
        return plan, visibility

    def section_keys(self, batch: Any, tile: TileConfig) -> int | None:
        """As the rules of a wrapper have it."""
        if tile.decode is not None:
            return None
        fused = batch.sizes.segment_rows * self.heads.group_size
        several = fused >= SHARING_TILES * tile.rows * batch.sizes.num_segments
        longest_first = self.longest_first
        return longest_first.cached_keys if longest_first is not None and several else None

    def native_plan(self, arguments: tuple[Any, ...], site: Site, bounds: Bounds) -> Any:
        batch = self.native.measure(Arguments(*arguments), bounds)
        assert batch is not None
        assert self.native.has_mask_inputs(self.inputs)
        found = np.full(site.room.total_ints, UNTOUCHED, np.int32)
        self.native.plan(self.inputs, site, found.ctypes.data)
        return found


def check_equal(
    planners: Planners,
    arguments: tuple[Any, ...],
    tile: TileConfig,
    site: Site,
    prices: RolePrices | None,
) -> None:
    """Both write the same bits, of which nobody reads the openings of empty lists."""
    room = site.room
    plan, visibility = planners.numpy_plan(arguments, tile, site, prices)
    verify(plan, visibility)
    expected = plan.pack(room, np.full(room.total_ints, UNTOUCHED, np.int32))
    openings = expected[room.offsets["openings"] :][: room.sizes["openings"]]
    nobody_reads = np.diff(plan.cta_indptr) == 0
    openings.reshape(plan.num_lists, -1)[nobody_reads] = UNTOUCHED
    assert np.array_equal(planners.native_plan(arguments, site, room.bounds), expected)
