"""Two roles in one launch of the CPU kernel: long prefills and decodes, each with its own tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import of_problem

import warploom as wl
from warploom.codegen.attention.templates import CUDA
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.source import TileConfig
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError, NoHostCompiler, UnsupportedSpec
from warploom.runtime.declaring.declare import make_spec
from warploom.runtime.declaring.structure import traced_once
from warploom.runtime.planning.rules import Rules
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.runtime.wrappers import explain as explain_module
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.layout import c_structs
from warploom.scheduler.model.roles import RolePrices
from warploom.testing import warm_up

LARGE, SMALL = TileConfig(48, 128, 1, 1), TileConfig(12, 64, 1, 1)
BOTH = TileConfig(48, 128, 1, 1, decode=SMALL)
WIDE = TileConfig(24, 64, 1, 1, decode=TileConfig(4, 128, 1, 1))  # decodes take more keys


def of(kv_format: Any, dtype: str, dim: int, tile: TileConfig = BOTH, **more: Any) -> Setup:
    return Setup(kv_format, dtype, dim, more.pop("dim_v", dim), tile=tile, **more)


POOL = [
    (wl.Causal(), of(wl.Ragged(), "float32", 64)),
    (wl.SlidingWindow(40) & wl.SoftCap(5.0), of(wl.Paged(16), "bfloat16", 64)),
    (wl.Causal() & wl.Rope(), of(wl.Paged(1), "float16", 32, WIDE)),
    (wl.QKNorm() & wl.AttentionSink(), of(wl.Paged(5), "float32", 64, dim_v=40)),
    (wl.Causal() & wl.SlidingWindow(30), of(wl.BlockSparse(block=(5, 3)), "float32", 32, WIDE)),
    (wl.FlashSigmoid(bias=-2.0), of(wl.Ragged(layout="HND"), "bfloat16", 64, WIDE)),
    (wl.TokenKVScale(), of(wl.Paged(3), "bfloat16", 64, kv_dtype="int8")),
]


@pytest.fixture(scope="module", autouse=True)
def every_plan_is_verified_and_the_same_everywhere() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARPLOOM_VERIFY_PLANS", "1")
        patch.setenv("WARPLOOM_THREADS", "4")  # 16 CTAs
        yield


@pytest.fixture(scope="module")
def pool() -> list[tuple[Variant, Setup]]:
    return warm_up(POOL)


def near_tiles(tile: TileConfig, group: int, of_keys: bool) -> st.SearchStrategy[int]:
    """0, 1, lengths around one to three tiles of either role, and any."""
    sizes = [x.keys if of_keys else max(x.rows // group, 1) for x in tile.of_roles.values()]
    borders = {n * size + d for size in sizes for n in (1, 2, 3) for d in (-1, 0, 1)}
    return st.one_of(st.sampled_from(sorted({0, 1} | borders)), st.integers(0, 3 * max(sizes)))


@st.composite
def cases(draw: Any, setup: Setup) -> Case:
    tile = setup.tile
    assert tile is not None
    assert tile.decode is not None
    groups = [size for size in (1, 2, 3, 4, 11, 12) if size <= tile.decode.rows]
    group = draw(st.sampled_from(groups))
    q_lens = draw(st.lists(near_tiles(tile, group, False), min_size=1, max_size=5))
    kv_lens = [draw(near_tiles(tile, group, True)) for _ in q_lens]
    return Case(
        setup, tuple(q_lens), tuple(kv_lens), draw(st.integers(1, 2)), group,
        draw(st.sampled_from([1.0, 8.0])), draw(st.integers(0, 99)),
        draw(st.sampled_from([None, 1, 3, 50])),
    )  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_batches_agree_with_the_oracle(
    pool: list[tuple[Variant, Setup]], data: st.DataObject
) -> None:
    variant, setup = data.draw(st.sampled_from(pool))
    found = mismatch(variant, data.draw(cases(setup)))
    assert found is None, found


@pytest.fixture(autouse=True)
def the_shortest_prefills_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tests are shorter than what is worth it on a GPU."""
    monkeypatch.setattr(RolePrices, "cut_tiles", lambda _, keys: 0)


@pytest.mark.parametrize("subject", POOL, ids=lambda found: f"{found[0].name}-{found[1]}")
def test_whole_prefills_agree_with_the_oracle(
    subject: tuple[Variant, Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RolePrices, "cut_tiles", lambda prices, _: prices.shortest_cut)
    variant, setup = subject
    case = Case(setup, (300, 1, 170, 1, 2), (900, 3000, 170, 2500, 40), 2, 2, seed=2)
    found = mismatch(variant, case)
    assert found is None, found


@pytest.mark.parametrize("subject", POOL, ids=lambda found: f"{found[0].name}-{found[1]}")
def test_long_prefills_and_decodes_are_split_and_merged(subject: tuple[Variant, Setup]) -> None:
    variant, setup = subject
    case = Case(setup, (200, 1, 1, 2), (900, 3000, 2500, 40), 1, 2, seed=1)
    found = mismatch(variant, case)
    assert found is None, found


def hybrid(tile: TileConfig, **options: Any) -> AttentionWrapper:
    return AttentionWrapper(
        wl.Causal(), num_q_heads=4, num_kv_heads=2, head_dim=64, dtype="float32", device="cpu",
        tile=tile, **options,
    )  # fmt: skip


Q_LENS, KV_LENS = [150, 1, 1, 0, 3, 1], [1200, 9000, 90, 7, 64, 6000]


def lengths() -> dict[str, Any]:
    return {
        "qo_indptr": np.append(0, np.cumsum(Q_LENS)).astype(np.int32),
        "kv_indptr": np.append(0, np.cumsum(KV_LENS)).astype(np.int32),
    }


def tensors() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(Q_LENS), 4, 64, generator=generator)
    k, v = (torch.randn(sum(KV_LENS), 2, 64, generator=generator) for _ in range(2))
    return q, (k, v)


@pytest.mark.parametrize("subject", POOL, ids=lambda found: f"{found[0].name}-{found[1]}")
def test_prefills_in_rounds_agree_with_the_oracle(
    subject: tuple[Variant, Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a cache held one key: on a CPU no batch is beyond it."""
    monkeypatch.setattr(Rules, "cached_keys", 1)
    variant, setup = subject
    case = Case(setup, (300, 1, 170, 1, 2), (900, 3000, 170, 2500, 40), 2, 2, seed=1)
    found = mismatch(variant, case)
    assert found is None, found


def test_prefills_beyond_the_cache_are_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rules, "cached_keys", 1)
    wrapper = hybrid(BOTH, sm_limit=4)
    wrapper.plan(**lengths())
    assert wrapper.planned is not None
    plan = wrapper.planned.plan
    prefill, _ = plan.work_of_roles()
    assert prefill.shared > prefill.ctas  # without rounds there are as many at most
    assert wrapper.planned.by == "the host, natively"


def test_one_plan_has_items_of_both_roles_and_splits_both() -> None:
    wrapper = hybrid(BOTH)
    wrapper.plan(**lengths())
    assert wrapper.planned is not None
    plan = wrapper.planned.plan
    assert [(role.name, role.rows, role.keys) for role in plan.problem.roles] == [
        ("prefill", 48, 128), ("decode", 12, 64),
    ]  # fmt: skip
    is_decode = np.isin(plan.items["segment"], [1, 2, 4, 5])
    assert np.array_equal(plan.role, is_decode)
    split = plan.items["slot"] >= 0
    assert (split & is_decode).any() and (split & ~is_decode).any()
    assert wrapper.planned.by == "the host, natively"
    assert len(plan.cta_indptr) == 11 * plan.problem.num_ctas + 1 and plan.num_shared_prefills > 0
    # A key costs 48 + 16 and 12 + 16, and a tile of 128 keys 8 units, one of 64 keys 16.
    assert plan.problem.prices == RolePrices((128 * 64 // 8, 64 * 28 // 16), 2**31 - 1)


@pytest.mark.parametrize("limit", [None, 3])
def test_lists_that_no_cta_has_for_its_own_are_run(limit: int | None) -> None:
    wrapper, expected = hybrid(BOTH, sm_limit=limit), hybrid(LARGE)
    for found in (wrapper, expected):
        found.plan(**lengths())
    assert wrapper.planned is not None
    plan = wrapper.planned.plan
    assert plan.cta_indptr[2 * plan.problem.num_ctas] < plan.cta_indptr[-1]
    torch.testing.assert_close(wrapper.run(*tensors()), expected.run(*tensors()))


def test_each_role_has_the_bits_of_a_kernel_with_its_tile_alone() -> None:
    """One CTA, so that nothing is split."""
    q, kv = tensors()
    outputs = {}
    for name, tile in (("both", BOTH), ("large", LARGE), ("small", SMALL)):
        wrapper = hybrid(tile, sm_limit=1)
        wrapper.plan(**lengths())
        outputs[name] = wrapper.run(q, kv)
    rows = Q_LENS[0]
    assert torch.equal(outputs["both"][:rows], outputs["large"][:rows])
    assert torch.equal(outputs["both"][rows:], outputs["small"][rows:])
    assert not torch.equal(outputs["large"][rows:], outputs["small"][rows:])


def test_all_batches_within_bounds_run_in_the_workspace_that_they_ask_for() -> None:
    bounds = Bounds(max_requests=6, max_q_rows=160, max_kv_len=4000)
    size = hybrid(BOTH, bounds=bounds).workspace_size().total
    memory = torch.full((size + 4096,), 171, dtype=torch.uint8)
    wrapper = hybrid(BOTH, bounds=bounds, workspace=memory[:size])
    expected = hybrid(LARGE)
    for q_lens in ([150, 1, 1, 0, 3, 1], [1] * 6, [160], [25, 25, 25, 25, 25, 35], []):
        qo = np.append(0, np.cumsum(q_lens)).astype(np.int32)
        kv = 4000 * np.arange(len(q_lens) + 1, dtype=np.int32)
        q = torch.randn(int(qo[-1]), 4, 64)
        k, v = torch.randn(int(kv[-1]), 2, 64), torch.randn(int(kv[-1]), 2, 64)
        for found in (wrapper, expected):
            found.plan(qo, kv)
        torch.testing.assert_close(wrapper.run(q, (k, v)), expected.run(q, (k, v)))
        assert (memory[size:] == 171).all()


def test_fixed_splits_are_told() -> None:
    wrapper = hybrid(BOTH, batch_invariant=True)
    wrapper.plan(**lengths())
    assert wrapper.planned is not None and wrapper.planned.by == "NumPy"
    facts = wrapper.explain().facts
    assert facts["assigned"] == "longest first: the tile has two roles"
    # 2 heads of 7 tiles of 48 rows, and of decodes of 5, 1, 1 and 3 chunks of 2,048 keys
    assert "14 work items" in str(facts["role prefill"])
    assert "20 work items" in str(facts["role decode"])


def test_explain_has_a_line_for_each_role() -> None:
    wrapper = hybrid(BOTH)
    wrapper.plan(**lengths())
    facts = wrapper.explain().facts
    assert facts["tile"] == "prefill 48 rows x 128 keys, decode 12 rows x 64 keys"
    assert str(facts["role prefill"]).startswith("tiles of 48 rows x 128 keys, 1 segment, ")
    assert str(facts["role decode"]).startswith("tiles of 12 rows x 64 keys, 4 segments, ")
    assert "for whoever is done" in str(facts["role prefill"])
    assert "for whoever is done" not in str(facts["role decode"])
    assert "predicted time" not in facts  # prices of a CPU have no unit
    way = "prefills longest first where they are few or alone, else by a Stream-K partition"
    assert facts["assigned"] == f"{way}: the tile has two roles"
    # 7 tiles of rows by 10 of keys, and 141, 2, 1 and 94 tiles of the decodes' keys
    assert str(facts["mask"]).startswith("308 tiles: ")
    alone = hybrid(SMALL)
    alone.plan(**lengths())
    assert not [name for name in alone.explain().facts if name.startswith("role ")]


def test_declarations_ask_for_one_kernel_and_a_planner_of_two_roles() -> None:
    declared = wl.AttentionDeclaration(
        wl.Causal(), num_q_heads=4, num_kv_heads=2, head_dim=64, dtype="float32", tile=BOTH
    )
    (source, _), (planner, _) = declared.jobs(host_target(), [host_target()])
    assert "PrefillConfig" in source.text and "DecodeConfig" in source.text
    assert "RolePlanner" in planner.text
    wrapper = declared.on("cpu")
    assert [job[0] for job in wrapper.build_jobs()] == [source]


def test_numpy_plans_what_the_host_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    natively, by_numpy = hybrid(BOTH), hybrid(BOTH)
    natively.plan(**lengths())

    def missing(*_: Any, **__: Any) -> Any:
        raise NoHostCompiler(tried="c++")

    monkeypatch.setattr("warploom.runtime.strategies.host_strategy.HostPlanner", missing)
    by_numpy.plan(**lengths())
    assert natively.planned is not None and by_numpy.planned is not None
    assert by_numpy.planned.by == "NumPy"
    found, expected = natively.planned.plan, by_numpy.planned.plan
    for name in ("header", "cta_indptr", "items", "merges", "segments", "loads"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize(
    "template", [x for x in CUDA if not x.takes_roles], ids=lambda found: type(found).__name__
)
def test_other_templates_for_gpus_have_one_role(template: Any) -> None:
    traced = traced_once(wl.Causal())[1]
    spec = make_spec(traced, 64, 64, "float16", wl.Ragged(), torch.device("cuda"))
    with pytest.raises(UnsupportedSpec, match="the one tile for all requests"):
        template.render(spec, TileConfig(64, 64, decode=TileConfig(16, 64)), c_structs())


@pytest.mark.parametrize(
    ("tile", "options", "reason"),
    [
        (TileConfig(48, 64, 1, 1, decode=LARGE), {}, "48 rows for decodes; expected 2 to 47"),
        (TileConfig(48, 64, 1, 1, decode=TileConfig(0, 64)), {}, "0 rows for decodes"),
        (TileConfig(96, 64, 1, 1, decode=BOTH), {}, "has one itself"),
        (TileConfig(48, 64, 1, 1, decode=12), {}, "decode=12; expected a TileConfig"),  # type: ignore[arg-type]
    ],
)
def test_refusals(tile: TileConfig, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        hybrid(tile, **options)


def test_explain_tells_the_predicted_time_of_a_gpu() -> None:
    wrapper = hybrid(BOTH)
    wrapper.plan(**lengths())
    assert wrapper.planned is not None
    plan = of_problem(wrapper.planned.plan, prices=RolePrices((1000, 500), 2))
    told: Any = explain_module.__dict__["_roles"](plan, "CTA", True)
    expected = f"{1e6 * (plan.predicted_seconds or 0):.1f} us, at the prices of an H200"
    assert told["predicted time"] == expected
    assert plan.predicted_seconds
