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
from support.native_plans import (
    TILES,
    TRACED,
    VARIANTS,
    Planners,
    check_equal,
    draw_arguments,
)
from support.parts import compiled

import warploom as wl
from warploom.codegen.build import build
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.planner_source import PlannerSpec
from warploom.codegen.source import TileConfig
from warploom.errors import CompileError, IndexOutOfRange, NoHostCompiler, NotPlanned, WarploomError
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Arguments, Measured
from warploom.runtime.planning.rules import smaller_roles
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies import host_planner
from warploom.runtime.strategies.planner_params import PlannerParams
from warploom.runtime.strategies.scratch import (
    deal_scratch_bytes,
    list_scratch_bytes,
    role_scratch_bytes,
    scratch_bytes,
)
from warploom.runtime.strategies.site import LongestFirst, Site
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.layout import c_planning
from warploom.scheduler.model.roles import RolePrices
from warploom.scheduler.plans.capacity import capacity
from warploom.scheduler.plans.verify import verify


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_native_plans_equal_numpy_plans(data: st.DataObject) -> None:
    kv_format = data.draw(st.sampled_from([wl.Paged(16), wl.Paged(1), wl.Ragged(), wl.Dense()]))
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
            data.draw(st.sampled_from([None, 1, 1, 20_000]), label="cached"),
            data.draw(st.sampled_from([1, 1, 1000, 4096]), label="cut"),
            data.draw(st.booleans(), label="may deal beside decodes"),
        )
    num_ctas = data.draw(st.integers(1, 528), label="CTAs")
    active = data.draw(st.integers(1, num_ctas), label="limit")
    longest_first, fewest = None, 0
    if data.draw(st.booleans(), label="longest first"):
        if tile.decode is not None and data.draw(st.booleans(), label="prefills alone"):
            fewest = tile.decode.rows // heads.group_size + 1
        longest_first = LongestFirst(
            data.draw(st.sampled_from([0, 384, 5000]), label="piece"),
            data.draw(st.sampled_from([None, 1, 700, 50_000]), label="cached"),
        )
    arguments, kv_lens = draw_arguments(data, kv_format, fewest)
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
    planners = Planners(name, kv_format, heads, inputs, tile.decode is not None, longest_first)
    site = Site.of(kv_format, heads, tile, room, active, prices, longest_first)
    check_equal(planners, arguments, tile, site, prices)


TILE = TileConfig(16, 32)
ROLES = TileConfig(16, 32, decode=TileConfig(4, 64))
LONGEST_FIRST = LongestFirst(384, 700)


@pytest.mark.parametrize(
    ("tile", "longest_first", "cached", "is_alone"),
    [
        (TILE, None, None, False),
        (ROLES, None, None, False),
        (ROLES, None, 1, False),
        (TILE, LONGEST_FIRST, None, False),
        (ROLES, LONGEST_FIRST, None, False),
        (ROLES, LONGEST_FIRST, 700, True),
        (TILE, LongestFirst(384, 5), None, False),
    ],
    ids=[
        "one role",
        "two roles",
        "in rounds",
        "longest first",
        "dealt",
        "prefills alone",
        "in a billion sections",
    ],
)
def test_costs_may_be_beyond_32_bits(
    tile: TileConfig, longest_first: LongestFirst | None, cached: int | None, is_alone: bool
) -> None:
    """Smaller ones are divided in 32."""
    heads, ctas, longest = Heads(16, 4), 131, 70_000_001
    short = 2 if is_alone else 1  # 8 fused rows do not decode
    q_lens, kv_lens = [short] * 20 + [30] * 6, longest - np.arange(26) * 999_983
    ends = [np.append(0, np.cumsum(lens)).astype(np.int32) for lens in (q_lens, kv_lens)]
    prices = RolePrices((1000, 300), 60, 300, cached) if tile.decode else None
    room = capacity(
        Bounds(26, sum(q_lens), longest), rows=tile.rows, keys=tile.keys, num_kv_heads=4,
        group_size=4, num_ctas=ctas, smaller=smaller_roles(tile),
    )  # fmt: skip
    inputs = SimpleNamespace(scalars={}, known={})
    has_roles = tile.decode is not None
    planners = Planners("causal", wl.Ragged(), heads, inputs, has_roles, longest_first)
    site = Site.of(wl.Ragged(), heads, tile, room, ctas, prices, longest_first)
    check_equal(planners, (*ends, None, None), tile, site, prices)


@pytest.mark.parametrize(
    ("tile", "longest_first"),
    [(TILE, None), (ROLES, None), (TILE, LONGEST_FIRST), (ROLES, LONGEST_FIRST)],
    ids=["one role", "two roles", "longest first", "dealt"],
)
@pytest.mark.parametrize(("requests", "rows", "ctas"), [(1, 1, 1), (7, 3, 40), (300, 1, 528)])
def test_scratch_memory_is_as_large_as_it_says(
    requests: int, rows: int, ctas: int, tile: TileConfig, longest_first: LongestFirst | None
) -> None:
    heads, prices = Heads(4, 1), RolePrices((1, 1), 1) if tile.decode else None
    inputs = SimpleNamespace(scalars={}, known={})
    has_roles = tile.decode is not None
    planners = Planners("causal", wl.Ragged(), heads, inputs, has_roles, longest_first)
    lens = np.arange(1, requests + 1) * 37 % 5000
    arguments = np.arange(requests + 1) * rows, np.append(0, np.cumsum(lens)), None, None
    arguments = tuple(None if a is None else a.astype(np.int32) for a in arguments)
    bounds = Bounds(requests, requests * rows, 5000)
    room = capacity(
        bounds, rows=16, keys=32, num_kv_heads=1, group_size=4, num_ctas=ctas,
        smaller=smaller_roles(tile),
    )  # fmt: skip
    site = Site.of(wl.Ragged(), heads, tile, room, ctas, prices, longest_first)
    planners.native_plan(arguments, site, bounds)
    host: Any = planners.native
    tiles = requests * rows * 4 // 16 + requests
    size = scratch_bytes(tiles, requests, ctas)
    if tile.decode is not None:
        size = role_scratch_bytes(tiles, requests, ctas)
        if longest_first is not None:
            size += deal_scratch_bytes(tiles, requests, 1, ctas)
    elif longest_first is not None:
        size = list_scratch_bytes(tiles, requests, ctas, 1, ctas)
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
      const warploom::Scratch scratch(warploom::shape_of_all(*p), nullptr);
      return reinterpret_cast<long long>(scratch.cut_key + p->slices + 1);
    }
    """
    source = PlannerSpec(TRACED["causal"]).render("cpp", c_planning())
    artifact = build(replace(source, text=source.text + end), host_target())
    found = ctypes.CDLL(str(artifact.path)).scratch_end
    found.argtypes, found.restype = (ctypes.c_void_p,), ctypes.c_longlong
    params = PlannerParams(TRACED["causal"])
    for tiles, requests, slices in ((1, 1, 1), (70, 9, 132), (9, 70, 17)):
        for name, size in (
            ("max_tiles", tiles), ("max_requests", requests), ("slices", slices)
        ):  # fmt: skip
            params.set(name, size)
        assert found(params.address) == scratch_bytes(tiles, requests, slices)


def test_small_shared_memory_holds_what_plans_of_two_roles_need() -> None:
    """64 requests with a chunk of 4,096 fused rows, on two CTAs of each of 128 SMs."""
    size = role_scratch_bytes(4096 // 64 + 64, 64, 2 * 128)
    assert PlannerSpec.RESERVED + size <= arch_named("sm_89").shared_per_cta


def test_lists_that_change_while_they_are_planned_are_refused() -> None:
    attention = wrapper()
    lists: Any = [np.array(x, np.int32) for x in ([0, 1, 2], [0, 1, 2], [0, 1], [4, 4])]
    attention.plan(*lists)
    batch = compiled(attention).planner.read(Arguments(*lists))
    lists[1][1] = 3
    with pytest.raises(RuntimeError, match="changed"):
        compiled(attention).planner.plan(batch, attention._inputs)


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

    def lowered(batch: Measured) -> None:
        raise AssertionError

    monkeypatch.setattr(Measured, "on_host", property(lowered))
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
    with pytest.raises(IndexOutOfRange, match=r"kv_indices\[\.\.\.\] is 7"):
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


def test_warm_wrappers_plan_long_prefills_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = wrapper()
    attention.warm_up()
    monkeypatch.setattr(host_planner, "build", None)
    indices, last = np.arange(500, dtype=np.int32), np.array([4], np.int32)
    for rows in (1, 2000):
        qo, kv = (np.array([0, size], np.int32) for size in (rows, 500))
        attention.plan(qo, kv, indices, last)
        assert attention.planned is not None and attention.planned.by == "the host, natively"
        assert attention.planned.plan.problem.stream_k == (rows == 1)


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (NoHostCompiler(tried="c++"), "INFO"),
        (CompileError(compiler="c++", kernel="planner", path="there", log="wrong"), "WARNING"),
    ],
    ids=["no compiler", "it fails"],
)
def test_without_a_compiler_numpy_plans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, level: str
) -> None:
    """Which nobody is told who does not ask, unless there is one that should have done."""
    attention = wrapper()

    def missing(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("warploom.runtime.strategies.host_strategy.HostPlanner", missing)
    caplog.set_level("INFO", "warploom")
    attention.plan([0, 1], [0, 2], [7, 1], [3])
    assert attention.planned is not None
    assert type(attention.planned.batch).__name__ == "HostBatch"
    said = [line for line in caplog.records if "no native planner" in line.message]
    assert [line.levelname for line in said] == [level]


WRONG: list[tuple[Any, ...]] = [
    ([1, 2], [0, 2], [7, 1], [3]),
    ([0, 2, 1], [0, 1, 2], [7, 1], [3, 3]),
    ([0, 1], [1, 2], [7, 1], [3]),
    ([0, 1, 2], [0, 2, 1], [7, 1], [3, 3]),
    ([0, 1], [0, 2], [7, -1], [3]),
    ([0, 1], [0, 2], [7, -(2**31)], [3]),
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
