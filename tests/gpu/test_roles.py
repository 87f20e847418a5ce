"""Prefill and decode in one launch on a GPU: mixes get it by themselves, and graphs replay it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.query_rope import QueryRope

import warploom as wl
from warploom.codegen.attention import templates
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.variants.variant import Variant
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.planning.rules import Rules
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.scheduler.model.roles import SHORTEST_CUT, RolePrices
from warploom.scheduler.plans.verify import verify

pytestmark = pytest.mark.gpu

TILE = TileConfig(128, 128, 8, 2, "hopper", 1, decode=TileConfig(16, 128, 4, 2))
CHOSEN = TileConfig(128, 128, 8, 2, "hopper", 2, decode=TileConfig(8, 192, 6, 2))
GATHERED = TileConfig(128, 128, 8, 2, "hopper", 2, decode=TileConfig(8, 160, 5, 2))
TALLER = TileConfig(128, 128, 8, 2, "hopper", 2, decode=TileConfig(16, 160, 5, 2))
SMALL = TileConfig(128, 128, 8, 2, "hopper", 2, decode=TileConfig(16, 320, 10, 2))
# that are chosen for heads of 64 lanes, the second with a window, and of 96
OF_64 = TileConfig(192, 96, 12, 3, "hopper", 2, decode=TileConfig(8, 352, 11, 2))
OF_64_MASKED = TileConfig(128, 128, 8, 2, "hopper", 2, decode=TileConfig(8, 352, 11, 2))
OF_96 = TileConfig(128, 128, 8, 2, "hopper", 2, decode=TileConfig(8, 256, 8, 2))
# for groups of 9 to 16 heads
TALL_OF_64 = TileConfig(192, 96, 12, 3, "hopper", 2, decode=TileConfig(16, 320, 10, 2))
TALL_OF_96 = TileConfig(128, 128, 8, 2, "hopper", 2, decode=TileConfig(16, 192, 6, 2))
SHAPE: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
PAGE = 16
BATCHES = [
    ((380, *(1,) * 20), (2000, *range(100, 2100, 100))),  # as many rows as any
    ((1,) * 21, (900,) * 21),  # decodes alone
    ((200, 150), (1500, 150)),  # prefills alone
    ((), ()),
    ((1, 0, 340, 4, 1), (4000, 7, 340, 900, 1)),
    ((3, 1, 3, 31), (0, 64, 76, 15)),
]
PORTABLE = TileConfig(64, 64, 4, 2, decode=TileConfig(16, 64, 2, 2))
EIGHT = TileConfig(64, 64, 4, 2, decode=TileConfig(8, 64, 2, 2))
STREAMED = wl.Causal() & wl.SlidingWindow(300, sinks=4)
PACKED = wl.Causal() & wl.DocumentMask(torch.arange(4000, dtype=torch.int32)[None] // 130)
ROTATED = wl.Rolling(600, 4, positions="cache", layout="HND")
LONG = (1024, *(1,) * 32), (16384,) * 33
MIXES = (LONG, BATCHES[0], *BATCHES[4:])  # for which two roles pay


@pytest.fixture(autouse=True)
def _on_hopper(cuda: torch.device) -> None:
    if not templates.HOPPER.compiles_for(cuda_facts(cuda.index).arch):
        pytest.skip("roles on GPUs need sm_90a")


def cut_all(monkeypatch: pytest.MonkeyPatch, is_wanted: bool) -> None:
    """Whether prefills are cut however short they are."""
    least = 1 if is_wanted else SHORTEST_CUT
    monkeypatch.setattr(RolePrices, "cut_tiles", lambda _, keys: -(-least // keys))


@pytest.mark.parametrize(
    ("variant", "kv_format", "dtype", "dims", "tile"),
    [
        (wl.Causal(), wl.Paged(16), "bfloat16", (128, 128), CHOSEN),
        (wl.Causal() & wl.Alibi(), wl.Paged(8, layout="HND"), "float16", (128, 128), CHOSEN),
        (wl.Causal(), wl.Paged(16), "bfloat16", (128, 128), TALLER),
        (wl.Causal() & wl.SoftCap(20.0), wl.Paged(1), "float16", (128, 128), GATHERED),
        (wl.Alibi() & wl.Causal(), wl.Ragged(), "bfloat16", (128, 128), GATHERED),
        (wl.Causal() & wl.SlidingWindow(300), wl.Ragged(), "bfloat16", (128, 128), TILE),
        (wl.FlashSigmoid(bias=-2.0), wl.Paged(3), "bfloat16", (128, 128), TILE),
        # transforms by the warps that compute
        (wl.Causal() & QueryRope(), wl.Paged(16), "bfloat16", (128, 128), CHOSEN),
        (wl.Causal() & wl.Rope(), wl.Paged(1), "float16", (128, 128), TILE),
        (wl.Causal() & wl.QKNorm(), wl.Ragged(), "bfloat16", (128, 128), TILE),
        # compiled without hints for L2 where ptxas breaks copies that have some
        (wl.FlashSigmoid(bias=-2.0), wl.Ragged(), "float16", (64, 40), SMALL),
        (wl.Causal(), wl.Paged(16), "bfloat16", (64, 64), SMALL),
        (wl.Causal(), wl.Paged(16), "bfloat16", (128, 128), PORTABLE),
        (wl.Causal() & wl.Rope(), wl.Ragged(), "float16", (64, 64), PORTABLE),
        (wl.Causal(), wl.BlockSparse(block=(16, 32)), "bfloat16", (128, 128), GATHERED),
        (wl.Causal() & wl.SoftCap(20.0), wl.BlockSparse(block=(7, 5)), "float16", (64, 64), TILE),
        (wl.Causal(), wl.BlockSparse(block=(32, 128)), "bfloat16", (128, 128), PORTABLE),
        (STREAMED, wl.Rolling(700, 4), "bfloat16", (128, 128), GATHERED),
        (STREAMED, wl.Rolling(700, 4), "float16", (64, 64), PORTABLE),
        (wl.Causal() & wl.Rope(), ROTATED, "bfloat16", (128, 128), TALLER),
        # masks and logits that requests, rows or heads have of their own
        (STREAMED, wl.Paged(16), "bfloat16", (128, 128), CHOSEN),
        (wl.Causal() & wl.AttentionSink(), wl.Paged(16), "bfloat16", (128, 128), CHOSEN),
        (wl.Causal() & wl.AttentionSink(), wl.Composed(16), "float16", (64, 64), PORTABLE),
        (wl.PrefixLM(), wl.Ragged(), "bfloat16", (128, 128), GATHERED),
        (wl.PrefixLM(), wl.Paged(1), "float16", (64, 64), PORTABLE),
        (wl.Causal(), wl.Paged(16), "bfloat16", (64, 64), OF_64),
        (wl.Causal() & wl.SoftCap(20.0), wl.Paged(1), "float16", (64, 64), OF_64_MASKED),
        (STREAMED & wl.AttentionSink(), wl.Paged(16), "bfloat16", (64, 64), OF_64_MASKED),
        (wl.Causal() & QueryRope(), wl.Ragged(), "bfloat16", (96, 96), OF_96),
        (STREAMED, wl.Paged(16), "float16", (96, 96), OF_96),
        (wl.Causal(), wl.Paged(16), "bfloat16", (64, 64), TALL_OF_64),
        (STREAMED & wl.AttentionSink(), wl.Paged(16), "bfloat16", (96, 96), TALL_OF_96),
        # boxes that are parts of blocks
        (wl.Causal(), wl.Paged(80), "bfloat16", (128, 128), GATHERED),
        (STREAMED, wl.Paged(40, layout="HND"), "float16", (64, 64), OF_64_MASKED),
        (PACKED, wl.Paged(3), "bfloat16", (128, 128), TILE),
        (PACKED, wl.Ragged(), "bfloat16", (64, 64), PORTABLE),
    ],
)
def test_mixes_agree_with_the_oracle(
    monkeypatch: pytest.MonkeyPatch,
    variant: Variant,
    kv_format: KVFormat,
    dtype: str,
    dims: tuple[int, int],
    tile: TileConfig,
) -> None:
    """With prefills that are whole, and cut as if so short ones were worth it."""
    setup = Setup(kv_format, dtype, *dims, device="cuda", tile=tile)
    for seed, (q_lens, kv_lens) in enumerate(batch for batch in BATCHES if batch[0]):
        for sm_limit in (None, 1, 40):
            cut_all(monkeypatch, seed % 2 == 0 or sm_limit == 40)
            case = Case(setup, q_lens, kv_lens, 2, 4, seed=seed, sm_limit=sm_limit)
            found = mismatch(variant, case)
            assert found is None, f"{case}: {found}"


@pytest.mark.parametrize(
    ("tile", "group_size"),
    [
        pytest.param(tile, size, id=f"{name}, groups of {size}")
        for name, tile in (("8 rows", CHOSEN), ("16 rows", TALLER), ("portable", PORTABLE))
        for size in (1, 8, 16)
        if tile.decode is not None and size <= tile.decode.rows
    ],
)
def test_query_heads_are_alone_or_many_to_a_key_head(
    monkeypatch: pytest.MonkeyPatch, tile: TileConfig, group_size: int
) -> None:
    """Of many one row alone fills the tile for decodes."""
    setup = Setup(wl.Paged(16), "bfloat16", 128, 128, "cuda", tile)
    for seed, (q_lens, kv_lens) in enumerate(batch for batch in BATCHES if batch[0]):
        cut_all(monkeypatch, seed % 2 == 0)
        case = Case(setup, q_lens, kv_lens, 2, group_size, seed=seed)
        found = mismatch(wl.Causal(), case)
        assert found is None, f"{case}: {found}"


@pytest.mark.parametrize("group_size", [1, 4, 8])
@pytest.mark.parametrize(
    ("variant", "kv_format", "dtype", "tile"),
    [
        (wl.Causal(), wl.Paged(16), "bfloat16", PORTABLE),
        (wl.Causal() & wl.HeadKVScale(), wl.Ragged(), "float16", EIGHT),
        (wl.Causal() & wl.SoftCap(20.0), wl.Composed(16), "bfloat16", PORTABLE),
        (wl.Causal() & QueryRope(), wl.Paged(1), "bfloat16", EIGHT),
        (wl.Causal(), wl.Paged(16), "bfloat16", CHOSEN),
        (wl.Causal() & wl.HeadKVScale(), wl.Paged(1), "float16", TALLER),
        (wl.Causal() & wl.SoftCap(20.0), wl.Composed(16), "bfloat16", CHOSEN),
        (wl.Causal() & QueryRope(), wl.Ragged(), "bfloat16", CHOSEN),
        (wl.Causal() & wl.TokenKVScale(), wl.Paged(16), "bfloat16", CHOSEN),
    ],
    ids=[
        *("portable", "portable, scales", "portable, shared keys, cap", "portable, queries"),
        *("hopper", "hopper, scales", "hopper, shared keys, cap", "hopper, queries", "of tokens"),
    ],
)
def test_tiles_of_two_roles_read_8_bit_caches(
    monkeypatch: pytest.MonkeyPatch,
    variant: Variant,
    kv_format: KVFormat,
    dtype: str,
    tile: TileConfig,
    group_size: int,
) -> None:
    setup = Setup(kv_format, dtype, 128, 128, "cuda", tile, "float8_e4m3fn")
    for seed, (q_lens, kv_lens) in enumerate(batch for batch in BATCHES if batch[0]):
        cut_all(monkeypatch, seed % 2 == 0)
        case = Case(setup, q_lens, kv_lens, 2, group_size, seed=seed)
        found = mismatch(variant, case)
        assert found is None, f"{case}: {found}"


@pytest.mark.parametrize("tile", [TALLER, PORTABLE], ids=["hopper", "portable"])
@pytest.mark.parametrize("sm_limit", [None, 1, 8])
def test_mixes_in_rounds_agree_with_the_oracle(
    monkeypatch: pytest.MonkeyPatch, tile: TileConfig, sm_limit: int | None
) -> None:
    """As if a cache held one key; with eight CTAs there are more tiles than they have lists."""
    monkeypatch.setattr(Rules, "cached_keys", 1)
    cut_all(monkeypatch, True)
    setup = Setup(wl.Paged(16), "bfloat16", device="cuda", tile=tile)
    for seed in range(2):
        case = Case(
            setup, (1000, 1, 700, 1, 2), (3000, 5000, 700, 2500, 40), 2, 4, seed=seed,
            sm_limit=sm_limit,
        )  # fmt: skip
        found = mismatch(wl.Causal(), case)
        assert found is None, f"{case}: {found}"


def arrays(q_lens: Any, kv_lens: Any, device: Any) -> dict[str, Any]:
    pages = [-(-n // PAGE) for n in kv_lens]
    found = {
        "qo_indptr": np.cumsum([0, *q_lens]),
        "kv_indptr": np.cumsum([0, *pages]),
        "kv_indices": np.random.default_rng(len(pages)).permutation(sum(pages)),
        "last_page_len": np.array([(n - 1) % PAGE + 1 if n else 0 for n in kv_lens]),
    }
    return {k: torch.tensor(v, dtype=torch.int32, device=device) for k, v in found.items()}


@pytest.mark.parametrize("bounds", [None, wl.Bounds(128, 4096, 40_000, 200_000)])
@pytest.mark.parametrize("lanes", [64, 96, 128])
def test_a_mix_takes_two_roles_and_others_one(
    cuda: Any, bounds: wl.Bounds | None, lanes: int
) -> None:
    options = {**SHAPE, "head_dim": lanes, "kv_format": wl.Paged(PAGE), "device": cuda}
    wrapper = wl.AttentionWrapper(wl.Causal(), bounds=bounds, **options)
    for q_lens, kv_lens in (*BATCHES, LONG, *BATCHES[:1]):
        wrapper.plan(**arrays(q_lens, kv_lens, "cpu"))
        assert wrapper.planned is not None and wrapper.choice is not None
        assert bool(wrapper.choice.tile.of_roles) == ((q_lens, kv_lens) in MIXES)
        assert wrapper.planned.by == "the host, natively"
        told = str(wrapper.explain().facts.get("two roles", "no"))
        assert told.startswith("yes") == bool(wrapper.choice.tile.of_roles)


@pytest.mark.parametrize("tile", [TILE, CHOSEN, TALLER, PORTABLE], ids=str)
def test_invariant_roles_give_a_request_the_same_bits_among_any_neighbours(
    cuda: Any, tile: TileConfig
) -> None:
    """Chunks of either role, of which some are claimed: alone, among others, on fewer CTAs."""
    options: dict[str, Any] = {
        **SHAPE, "kv_format": wl.Paged(PAGE), "device": cuda, "cuda_graph": False, "tile": tile,
        "batch_invariant": True,
    }  # fmt: skip
    alone, free = (wl.AttentionWrapper(wl.Causal(), **options) for _ in range(2))
    limited = wl.AttentionWrapper(wl.Causal(), **options, sm_limit=7)
    options["tile"] = replace(tile, decode=None)
    oracle = wl.AttentionWrapper(wl.Causal(), **options)
    q_lens, kv_lens = [700, *[1] * 24, 300], [9000, *range(500, 12_500, 500), 6000]
    batch = arrays(q_lens, kv_lens, "cpu")
    rows, pages = np.cumsum([0, *q_lens]), batch["kv_indptr"].tolist()
    q = torch.randn(int(rows[-1]), 8, 128, device=cuda, dtype=torch.bfloat16)
    cache = torch.randn(pages[-1], 2, PAGE, 2, 128, device=cuda, dtype=torch.bfloat16)
    results = []
    for wrapper in (free, limited, oracle):
        wrapper.plan(**batch)
        results.append(wrapper.run(q, cache).clone())
    assert free.planned is not None and free.planned.plan.num_shared_prefills > 0
    assert set(free.planned.plan.role) == {0, 1} and free.planned.plan.num_slots > 0
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], results[2], atol=2e-2, rtol=2e-2)
    for number in (0, 1, 10, 24, 25):
        own = slice(rows[number], rows[number + 1])
        one = arrays(q_lens[number : number + 1], kv_lens[number : number + 1], "cpu")
        one["kv_indices"] = batch["kv_indices"][pages[number] : pages[number + 1]]
        alone.plan(**one)
        assert torch.equal(alone.run(q[own], cache), results[0][own]), number


@pytest.mark.parametrize("tile", [TILE, None], ids=["given", "chosen"])
@pytest.mark.parametrize("planner", ["cpu", "cuda"])
def test_one_graph_serves_any_mix(cuda: Any, planner: str, tile: TileConfig | None) -> None:
    """Counters are left at zero, whoever plans; the plan before the last replay is the one run."""
    bounds = wl.Bounds(32, 400, 4096, 2048)
    variant, device = wl.Causal(), cuda
    shape = {**SHAPE, "kv_format": wl.Paged(PAGE), "device": device}
    wrapper = wl.AttentionWrapper(variant, bounds=bounds, cuda_graph=True, tile=tile, **shape)
    other = wl.AttentionWrapper(variant, tile=replace(TILE, decode=None), **shape)
    cache = torch.randn(2048, 2, PAGE, 2, 128, device=device, dtype=torch.bfloat16)
    q = torch.randn(400, 8, 128, device=device, dtype=torch.bfloat16)
    out = torch.zeros_like(q)

    def plan(q_lens: Any, kv_lens: Any) -> None:
        wrapper.plan(**arrays(q_lens, kv_lens, planner), **more)

    more = {"q_rows": 400} if planner == "cuda" else {}
    plan(*BATCHES[0])
    assert wrapper.tile is not None and wrapper.tile.of_roles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, cache, out=out)
    for q_lens, kv_lens in BATCHES * 2:
        plan(q_lens, kv_lens)
        for _ in range(3):
            out.zero_()
            graph.replay()
        count = sum(q_lens)
        if not count:
            continue
        other.plan(**arrays(q_lens, kv_lens, "cpu"))
        expected = other.run(q[:count], cache)
        torch.testing.assert_close(out[:count], expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("tile", [None, TILE, PORTABLE], ids=["chosen", "given", "portable"])
def test_one_graph_holds_plan_and_run_of_any_mix(cuda: Any, tile: TileConfig | None) -> None:
    """Lengths change in device memory between replays, and with them who decodes; nothing else."""
    requests, rows, pages = 32, 400, 2048
    shape = {**SHAPE, "kv_format": wl.Paged(PAGE), "device": cuda}
    bounds = wl.Bounds(requests, rows, 4096, pages)
    wrapper = wl.AttentionWrapper(wl.Causal(), bounds=bounds, cuda_graph=True, tile=tile, **shape)
    other = wl.AttentionWrapper(wl.Causal(), tile=replace(TILE, decode=None), **shape)
    cache = torch.randn(pages, 2, PAGE, 2, 128, device=cuda, dtype=torch.bfloat16)
    q = torch.randn(rows, 8, 128, device=cuda, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    lists = padded(BATCHES[0], requests, pages, cuda)
    wrapper.plan(**lists)
    wrapper.run(q, cache, out=out)
    assert wrapper.tile is not None and wrapper.tile.decode is not None
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        wrapper.plan(**lists)
        wrapper.run(q, cache, out=out)
    assert wrapper.planned is not None and wrapper.planned.by == "the device"
    for q_lens, kv_lens in BATCHES * 2:
        for name, values in padded((q_lens, kv_lens), requests, pages, cuda).items():
            lists[name].copy_(values)
        for _ in range(2):  # counters are left at zero
            out.fill_(7.0)
            graph.replay()
        wrapper.check_plan()
        plan, visibility, _ = wrapper.planned.read()
        verify(plan, visibility)
        roles = {int(n * 4 <= wrapper.tile.decode.rows) for n in q_lens if n}
        assert set(plan.role.tolist()) == roles
        count = sum(q_lens)
        assert (out[count:] == 7.0).all()
        if count:
            other.plan(**arrays(q_lens, kv_lens, "cpu"))
            expected = other.run(q[:count], cache)
            torch.testing.assert_close(out[:count], expected, atol=2e-2, rtol=2e-2)


def padded(batch: Any, requests: int, pages: int, device: Any) -> dict[str, Any]:
    """A batch in tensors of one size, whose further requests have no rows and no keys."""
    found = arrays(batch[0], batch[1], device)  # page numbers depend on how many requests there are
    sizes = {"kv_indices": pages, "last_page_len": requests}
    for name, values in found.items():
        missing = sizes.get(name, requests + 1) - len(values)
        filling = values[-1:] if name.endswith("indptr") else values.new_zeros(1)
        found[name] = torch.cat((values, filling.expand(missing)))
    return found
