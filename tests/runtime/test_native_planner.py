"""The native planner writes the plans of NumPy's planner, bit for bit."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import warploom as wl
from warploom.codegen.build import build
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.planner_source import PlannerSpec, role_scratch_bytes, scratch_bytes
from warploom.codegen.source import TileConfig
from warploom.dsl.masks.intervals import TileAnalysis
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import TracedVariant
from warploom.dsl.variants.trace import trace
from warploom.errors import IndexOutOfRange, NoHostCompiler, NotPlanned, WarploomError
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.base import Arguments
from warploom.runtime.planning import host_strategy
from warploom.runtime.planning.host_strategy import HostPlanner
from warploom.runtime.planning.places import Site
from warploom.runtime.planning.planner_params import PlannerParams
from warploom.runtime.planning.rules import smaller_roles
from warploom.runtime.planning.visibility import Heads, make_visibility
from warploom.scheduler.bounds import Bounds
from warploom.scheduler.capacity import capacity
from warploom.scheduler.layout import c_structs
from warploom.scheduler.plan import Plan, make_plan
from warploom.scheduler.roles import RolePrices
from warploom.scheduler.verify import verify

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


def draw_arguments(data: st.DataObject, kv_format: KVFormat) -> tuple[tuple[Any, ...], Any]:
    q_lens, kv_lens, rng = draw_lengths(data)
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
    ) -> None:
        self.traced, self.format, self.heads, self.inputs = TRACED[name], kv_format, heads, inputs
        self.native = HostPlanner(self.traced, kv_format, heads.group_size, has_roles)

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
        plan = make_plan(
            batch.segments, num_kv_heads=self.heads.num_kv, group_size=self.heads.group_size,
            rows=tile.rows, keys=tile.keys, num_ctas=site.room.num_ctas,
            visibility=visibility, capacity=site.room, sm_limit=site.active_ctas, stream_k=True,
            indices=batch.indices, smaller=smaller_roles(tile), prices=prices,
        )  # fmt: skip
        return plan, visibility

    def native_plan(self, arguments: tuple[Any, ...], site: Site, bounds: Bounds) -> Any:
        batch = self.native.measure(Arguments(*arguments), bounds)
        assert batch is not None
        assert self.native.knows(self.inputs)
        found = np.full(site.room.total_ints, UNTOUCHED, np.int32)
        self.native.plan(self.inputs, site, found.ctypes.data)
        return found


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_native_plans_equal_numpy_plans(data: st.DataObject) -> None:
    kv_format = data.draw(st.sampled_from([wl.Paged(16), wl.Paged(1), wl.Ragged(), wl.Dense()]))
    arguments, kv_lens = draw_arguments(data, kv_format)
    num_kv = data.draw(st.sampled_from([1, 2, 5, 8]), label="heads")
    heads = Heads(num_kv * data.draw(st.sampled_from([1, 3, 4])), num_kv)
    tile = data.draw(st.sampled_from(TILES), label="tile")
    prices = None
    if tile.decode is not None:
        price = st.one_of(st.just(1), st.integers(1, 2_000_000))
        prices = RolePrices(
            (data.draw(price, label="prefill"), data.draw(price, label="decode")),
            data.draw(st.integers(1, 600), label="saturating"),
            data.draw(st.sampled_from([1, 300, 1024]), label="claim"),
        )
    num_ctas = data.draw(st.integers(1, 528), label="CTAs")
    active = data.draw(st.integers(1, num_ctas), label="limit")
    name = data.draw(st.sampled_from(list(VARIANTS)), label="mask")
    known = {"prefix_len": (kv_lens // 3).astype(np.int32)} if name == "prefix" else {}
    if name == "prefix" and len(kv_lens) == 0:
        return
    scalars = {field.name: field.default for field in TRACED[name].scalars}
    inputs: Any = SimpleNamespace(scalars=scalars | {"left": 500} if scalars else {}, known=known)
    batch = make_batch(kv_format, *arguments)
    spare = data.draw(st.integers(0, 9), label="spare")
    bounds = Bounds(
        batch.num_requests + spare, int(batch.q_lens.sum()) + spare,
        batch.sizes.max_kv_len + spare, len(batch.indices) + spare,
    )  # fmt: skip
    room = capacity(
        bounds, rows=tile.rows, keys=tile.keys, num_kv_heads=num_kv,
        group_size=heads.group_size, num_ctas=num_ctas, smaller=smaller_roles(tile),
    )  # fmt: skip
    planners = Planners(name, kv_format, heads, inputs, tile.decode is not None)
    site = Site.of(kv_format, heads, tile, room, active, prices)
    plan, visibility = planners.numpy_plan(arguments, tile, site, prices)
    verify(plan, visibility)
    expected = plan.pack(room, np.full(room.total_ints, UNTOUCHED, np.int32))
    openings = expected[room.offsets["openings"] :][: room.sizes["openings"]]
    nobody_reads = np.diff(plan.cta_indptr) == 0
    openings.reshape(plan.num_lists, -1)[nobody_reads] = UNTOUCHED
    assert np.array_equal(planners.native_plan(arguments, site, bounds), expected)


ROLES = TileConfig(16, 32, decode=TileConfig(4, 64))


@pytest.mark.parametrize("tile", [TileConfig(16, 32), ROLES], ids=["one role", "two roles"])
@pytest.mark.parametrize(("requests", "rows", "ctas"), [(1, 1, 1), (7, 3, 40), (300, 1, 528)])
def test_scratch_memory_is_as_large_as_it_says(
    requests: int, rows: int, ctas: int, tile: TileConfig
) -> None:
    heads, prices = Heads(4, 1), RolePrices((1, 1), 1) if tile.decode else None
    inputs = SimpleNamespace(scalars={}, known={})
    planners = Planners("causal", wl.Ragged(), heads, inputs, tile.decode is not None)
    lens = np.arange(1, requests + 1) * 37 % 5000
    arguments = np.arange(requests + 1) * rows, np.append(0, np.cumsum(lens)), None, None
    arguments = tuple(None if a is None else a.astype(np.int32) for a in arguments)
    bounds = Bounds(requests, requests * rows, 5000)
    room = capacity(
        bounds, rows=16, keys=32, num_kv_heads=1, group_size=4, num_ctas=ctas,
        smaller=smaller_roles(tile),
    )  # fmt: skip
    site = Site.of(wl.Ragged(), heads, tile, room, ctas, prices)
    planners.native_plan(arguments, site, bounds)
    host: Any = planners.native
    size = scratch_bytes(requests * rows * 4 // 16 + requests, requests, ctas)
    if tile.decode is not None:
        size = role_scratch_bytes(requests * rows * 4 // 16 + requests, requests, ctas)
    assert site.scratch == size
    host._scratch = np.full(4 * size + 4096, 0xAB, np.uint8)
    host._scratch_at = -(-host._scratch.ctypes.data // 16) * 16
    planners.native_plan(arguments, site, bounds)
    end = host._scratch_at - host._scratch.ctypes.data + size
    assert (host._scratch[end:] == 0xAB).all()
    assert (host._scratch[:end] != 0xAB).any()


def test_scratch_memory_ends_where_the_header_says() -> None:
    end = """
    extern "C" __attribute__((visibility("default"))) long long scratch_end(
        const warploom::Params* p) {
      const warploom::Scratch scratch(*p, nullptr);
      return reinterpret_cast<long long>(scratch.cut_key + p->columns + 1);
    }
    """
    source = PlannerSpec(TRACED["causal"]).render("cpp", c_structs())
    artifact = build(replace(source, text=source.text + end), host_target())
    found = ctypes.CDLL(str(artifact.path)).scratch_end
    found.argtypes, found.restype = (ctypes.c_void_p,), ctypes.c_longlong
    params = PlannerParams(TRACED["causal"])
    for tiles, requests, columns in ((1, 1, 1), (70, 9, 132), (9, 70, 17)):
        for name, size in (
            ("max_tiles", tiles), ("max_requests", requests), ("columns", columns)
        ):  # fmt: skip
            params.set(name, size)
        assert found(params.address) == scratch_bytes(tiles, requests, columns)


def test_lists_that_change_while_they_are_planned_are_refused() -> None:
    attention = wrapper()
    lists: Any = [np.array(x, np.int32) for x in ([0, 1, 2], [0, 1, 2], [0, 1], [4, 4])]
    attention.plan(*lists)
    batch = attention._planner.read(Arguments(*lists))
    lists[1][1] = 3
    with pytest.raises(RuntimeError, match="changed"):
        attention._planner.plan(batch, attention._inputs)


def wrapper(**options: Any) -> wl.AttentionWrapper:
    return wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(4), num_q_heads=4, num_kv_heads=2, head_dim=16,
        dtype="float32", device="cpu", **options,
    )  # fmt: skip


def test_wrappers_plan_natively_and_read_the_plan_back() -> None:
    attention = wrapper()
    arguments = [0, 1, 2, 3], [0, 2, 2, 5], [7, 1, 0, 3, 9], [3, 0, 4]
    attention.plan(*arguments)
    planned = attention.planned
    assert planned is not None
    assert type(planned.batch).__name__ == "Measured"
    verify(planned.plan, planned.visibility)
    assert planned.plan.indices.tolist() == arguments[2]
    assert planned.plan.segments["kv_len"].tolist() == [7, 0, 12]
    assert planned.plan.loads.sum() > 0


def far(logits: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
    return logits - 0.1 * (q_idx - kv_idx)


@pytest.mark.parametrize(
    "variant",
    [wl.Causal() & wl.SoftCap(30.0), wl.Causal() & wl.SlidingWindow(8), wl.flex(far)],
    ids=["soft-cap", "window", "mod"],
)
def test_variants_without_a_check_have_no_batch_lowered(
    variant: wl.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading lengths for a check that has nothing to say took four times as long as planning."""

    def lowered(*given: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(host_strategy, "make_batch", lowered)
    wrapper = wl.AttentionWrapper(
        variant, kv_format=wl.Paged(16), num_q_heads=4, num_kv_heads=2, head_dim=64,
        dtype="float32", device="cpu",
    )  # fmt: skip
    wrapper.plan([0, 5, 6], [0, 1, 3], [2, 0, 1], [16, 7])
    assert wrapper.planned is not None and wrapper.planned.is_native


def test_a_plan_tells_of_what_was_planned_and_not_of_what_became_of_the_arrays() -> None:
    attention = wrapper()
    arguments = [np.array(x, np.int32) for x in ([0, 1, 2], [0, 2, 3], [7, 1, 3], [3, 4])]
    attention.plan(*arguments)
    for array in arguments:
        array[:] = 0
    facts = attention.explain().facts
    assert facts["batch"] == "2 requests, 2 query rows, 11 keys, longest 7"
    k, v = torch.zeros(2, 5, 4, 2, 16)
    with pytest.raises(IndexOutOfRange, match=r"kv_indices\[0\] is 7"):
        attention.run(torch.zeros(2, 4, 16), (k, v))


def test_an_earlier_plan_that_was_kept_is_not_read_from_a_later_one() -> None:
    attention = wrapper()
    attention.plan([0, 1], [0, 2], [7, 1], [3])
    read = attention.planned
    assert read is not None
    indices = read.plan.indices
    attention.plan([0, 1], [0, 1], [4], [3])
    unread = attention.planned
    attention.plan([0, 1], [0, 1], [5], [3])
    assert read.plan.indices is indices
    assert unread is not None
    with pytest.raises(NotPlanned, match="taken the place"):
        _ = unread.plan


def test_batches_that_grow_and_shrink_lie_where_new_wrappers_put_them() -> None:
    attention = wrapper()
    for requests, pages in ((1, 1), (5, 3), (4, 3), (4, 4), (60, 2), (3, 40), (0, 0), (2, 1)):
        indptr = np.arange(requests + 1, dtype=np.int32)
        lists = indptr, indptr * pages, np.arange(requests * pages), np.full(requests, 3)
        fresh = wrapper()
        for one in (attention, fresh):
            one.plan(*lists)
        planned, expected = attention.planned, fresh.planned
        assert planned is not None and expected is not None
        assert planned.size == expected.size
        assert len(planned.plan.segments) == requests
        verify(planned.plan, planned.visibility)


def test_without_a_compiler_numpy_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = wrapper()

    def missing(*_: Any) -> Any:
        raise NoHostCompiler(tried="c++")

    monkeypatch.setattr("warploom.runtime.planning.host_strategy.HostPlanner", missing)
    attention.plan([0, 1], [0, 2], [7, 1], [3])
    assert attention.planned is not None
    assert type(attention.planned.batch).__name__ == "Batch"


WRONG: list[tuple[Any, ...]] = [
    ([1, 2], [0, 2], [7, 1], [3]),
    ([0, 2, 1], [0, 1, 2], [7, 1], [3, 3]),
    ([0, 1], [1, 2], [7, 1], [3]),
    ([0, 1, 2], [0, 2, 1], [7, 1], [3, 3]),
    ([0, 1], [0, 2], [7, -1], [3]),
    ([0, 1], [0, 2], [7], [3]),
    ([0, 1], [0, 2], [7, 1], [5]),
    ([0, 1], [0, 2], [7, 1], [0]),
    ([0, 1], [0, 2], [7, 1], [3, 3]),
    ([0, 1], [0, 2, 2], [7, 1], [3]),
    ([], [0], [], []),
    ([1], [0], [], []),
    ([0], [2], [], []),
    ([0, 1], [0, 2], [7, 1], None),
]


@pytest.mark.parametrize("arguments", WRONG)
def test_errors_are_those_of_make_batch(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(WarploomError) as expected:
        make_batch(wl.Paged(4), *arguments)
    attention = wrapper()
    with pytest.raises(type(expected.value)) as found:
        attention.plan(*arguments)
    assert str(found.value) == str(expected.value)
