"""The composed format on a GPU: random trees against the oracle, full-size prefixes, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.composed_variants import EveryHook, NormOfRequest

import warploom as wl
from warploom.codegen.attention import templates
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.scheduler.composed import sharing
from warploom.scheduler.composed.plan import ComposedPlan
from warploom.scheduler.composed.verify import verify_composed
from warploom.testing import run_property, warm_up

pytestmark = pytest.mark.gpu


def on_gpu(page: int, dtype: str, dim: int, layout: Any = "NHD") -> Setup:
    return Setup(wl.Composed(page, layout=layout), dtype, dim, dim, "cuda")


STREAMED = wl.TileConfig(16, 32, 2, 2)
PORTABLE = wl.TileConfig(64, 64, 4, 2, decode=wl.TileConfig(16, 64, 2, 2))
HOPPER = wl.TileConfig(128, 128, 8, 2, "hopper", 2, decode=wl.TileConfig(8, 192, 6, 2))
POOL = [
    (wl.Variant(), on_gpu(16, "bfloat16", 128)),
    (wl.Causal() & wl.SoftCap(5.0), on_gpu(1, "float16", 80)),
    (wl.SlidingWindow(9, 2, 3), on_gpu(4, "bfloat16", 64)),
    (wl.Causal() & wl.Rope(), on_gpu(16, "bfloat16", 128, "HND")),
    (wl.Causal() & wl.Alibi(), on_gpu(8, "float16", 96)),
    (wl.FlashSigmoid(bias=-2.0), on_gpu(7, "float16", 40)),
    (wl.Causal() & wl.AttentionSink(), on_gpu(16, "float16", 256)),
    (EveryHook(), on_gpu(4, "float16", 128)),
    (NormOfRequest(), on_gpu(4, "bfloat16", 64)),
]


@pytest.fixture(scope="module")
def pool() -> Any:
    """Kernels of all subjects for every tile."""
    jobs = []
    for variant, setup in POOL:
        wrapper = wl.AttentionWrapper(
            variant, kv_format=setup.kv_format, num_q_heads=1, head_dim=setup.head_dim,
            dtype=setup.dtype, device="cuda",
        )  # fmt: skip
        roles = [PORTABLE] if setup.head_dim <= 128 else []
        tiles = dict.fromkeys([*wrapper.tiles(), STREAMED, *roles])
        jobs += [(variant, replace(setup, tile=tile)) for tile in tiles]
    return warm_up(jobs)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever may be a part is one, so that small batches have deep trees."""
    monkeypatch.setattr(sharing, "PER_ITEM", 0)
    monkeypatch.setattr(sharing, "PER_ROW", 0)


@pytest.mark.usefixtures("eager")
def test_random_trees_agree_with_the_oracle(pool: Any) -> None:
    run_property(pool, None, max_examples=300)


@pytest.mark.parametrize("q_len", [1, 5])
def test_many_requests_of_several_levels(pool: Any, q_len: int) -> None:
    lengths = (700, 1, 0, 900, 650, 800, 777, 333, 640, 701, 702, 90)
    for variant, setup in pool:
        case = Case(setup, (q_len,) * 12, lengths, num_kv_heads=2, group_size=2, seed=q_len)
        found = mismatch(variant, case)
        assert found is None, f"{variant} {setup}: {found}"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", range(4))
def test_output_transforms_that_reduce_where_ctas_have_no_items(pool: Any, seed: int) -> None:
    """Few short requests: rows are merged by CTAs that never opened an item, too."""
    for variant, setup in pool:
        if not isinstance(variant, NormOfRequest):
            continue
        case = Case(setup, (3, 1, 2), (40, 33, 45), num_kv_heads=1, group_size=2, seed=seed)
        found = mismatch(variant, case)
        assert found is None, f"{setup}: {found}"


SHAPE: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


def shared_prefix(prefix: int, suffixes: list[int], page: int = 16) -> dict[str, Any]:
    """Requests that share their first `prefix` keys."""
    shared = prefix // page
    parts = [wl.Part(range(len(suffixes)), range(shared))]
    fresh = shared
    for i, suffix in enumerate(suffixes):
        pages = -(-suffix // page)
        last = (suffix - 1) % page + 1 if suffix else None
        parts.append(wl.Part([i], range(fresh, fresh + pages), last))
        fresh += pages
    return wl.compose(parts, num_requests=len(suffixes), page_size=page)


def attend(kv_format: Any, variant: Any, qo: Any, table: dict[str, Any], q: Any, kv: Any) -> Any:
    wrapper = wl.AttentionWrapper(variant, kv_format=kv_format, device=q.device, **SHAPE)
    wrapper.plan(qo, **table)
    return wrapper, *wrapper.run(q, kv, return_lse=True)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Two results of bfloat16, each with an error of its own: per row, against the row's norm."""
    out, expected = out.float(), expected.float()
    error = (out - expected).norm(dim=-1)
    assert bool((error <= 2e-2 * expected.norm(dim=-1) + 1e-6).all())


@pytest.mark.parametrize("batch", [3, 16, 64])
@pytest.mark.parametrize("rows", [1, 4])
def test_long_prefixes_agree_with_the_single_format(cuda: Any, batch: int, rows: int) -> None:
    suffixes = [(37 * i) % 200 for i in range(batch)]
    table = shared_prefix(8192, suffixes)
    pages = int(table["kv_indices"].max()) + 1
    kv = torch.randn(pages, 2, 16, 8, 128, device=cuda, dtype=torch.bfloat16)
    q = torch.randn(batch * rows, 32, 128, device=cuda, dtype=torch.bfloat16)
    qo = np.arange(batch + 1) * rows
    for variant in (wl.Causal(), wl.Causal() & wl.Alibi(), wl.SlidingWindow(4000)):
        composed, out, lse = attend(wl.Composed(16), variant, qo, table, q, kv)
        _, expected, sums = attend(wl.Paged(16), variant, qo, table, q, kv)
        close(out, expected)
        torch.testing.assert_close(lse, sums, atol=2e-3, rtol=1e-4)
        plan, arrays = composed.planned.plan, composed.planned.arrays
        assert isinstance(plan, ComposedPlan)
        assert plan.choices[0].kept
        verify_composed(plan, arrays.segments, composed.planned.visibility, 16)
        for _ in range(5):
            assert torch.equal(composed.run(q, kv), out)  # whoever comes last


def test_a_chunk_beside_decodes_of_one_prefix_takes_two_roles(cuda: Any) -> None:
    """Where overlapping pays; decodes alone, whose prefix is a prefill, have one tile."""
    if not templates.HOPPER.compiles_for(cuda_facts(cuda.index).arch):
        pytest.skip("two roles are chosen on sm_90a")
    table = shared_prefix(1024, [2048] * 33)
    pages = int(table["kv_indices"].max()) + 1
    kv = torch.randn(pages, 2, 16, 8, 128, device=cuda, dtype=torch.bfloat16)
    for rows, has_roles in ((512, True), (1, False)):
        qo = np.cumsum([0, rows, *[1] * 32])
        q = torch.randn(int(qo[-1]), 32, 128, device=cuda, dtype=torch.bfloat16)
        composed, out, lse = attend(wl.Composed(16), wl.Causal(), qo, table, q, kv)
        _, expected, sums = attend(wl.Paged(16), wl.Causal(), qo, table, q, kv)
        assert bool(composed.choice.tile.of_roles) == has_roles
        close(out, expected)
        torch.testing.assert_close(lse, sums, atol=2e-3, rtol=1e-4)
        verify_composed(
            composed.planned.plan, composed.planned.arrays.segments, composed.planned.visibility, 16
        )
        for _ in range(5):
            assert torch.equal(composed.run(q, kv), out)  # whoever claims and comes last


@pytest.mark.parametrize("tile", [None, HOPPER, PORTABLE], ids=["one tile", "hopper", "portable"])
def test_one_graph_serves_changing_trees(cuda: Any, tile: Any) -> None:
    if tile is HOPPER and not templates.HOPPER.compiles_for(cuda_facts(cuda.index).arch):
        pytest.skip("this tile needs sm_90a")
    rng = np.random.default_rng(0)
    rows = 24 if tile is None else 324
    bounds = wl.Bounds(24, rows, 5000, 24 * 313, max_levels=3)
    wrapper = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Composed(16), device=cuda, bounds=bounds, cuda_graph=True,
        tile=tile, **SHAPE,
    )  # fmt: skip
    kv = torch.randn(8000, 2, 16, 8, 128, device=cuda, dtype=torch.bfloat16)
    q = torch.randn(rows, 32, 128, device=cuda, dtype=torch.bfloat16)
    out = torch.empty_like(q)

    def draw(prefix: int, is_full: bool = False) -> tuple[Any, dict[str, Any]]:
        suffixes = rng.integers(0, 900, 24).tolist()
        chunk = rows - 23 if is_full else rng.integers(0, min(prefix + suffixes[0], rows - 23) + 1)
        return np.cumsum([0, chunk, *[1] * 23]), shared_prefix(prefix, suffixes)

    qo, table = draw(3200, is_full=True)
    wrapper.plan(qo, **table)
    wrapper.run(q, kv, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, kv, out=out)
    for prefix in (3200, 0, 16, 4000, 1600, 4080):
        qo, table = draw(prefix)
        wrapper.plan(qo, **table)
        graph.replay()
        _, expected, _ = attend(wl.Paged(16), wl.Causal(), qo, table, q[: qo[-1]], kv)
        close(out[: qo[-1]], expected)
