"""Keys that a kernel transforms before attention, on a GPU: against the oracle, and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.pretransformed_variants import OfHeads, OwnKeys

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.errors import ArgumentError
from warploom.runtime.launching.pretransformed_keys import Way
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.testing import warm_up

pytestmark = pytest.mark.gpu

HOPPER, PORTABLE = TileConfig(128, 64, 8, 2, "hopper", 1), TileConfig(64, 64, 4, 2)
FEW = TileConfig(16, 32, 2, 2)
SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}


def both(kv_format: KVFormat, dtype: str, dim: int, tile: TileConfig = HOPPER) -> list[Setup]:
    ways: tuple[Way, ...] = ("before", "fused")
    return [Setup(kv_format, dtype, dim, dim, "cuda", tile, key_transform=way) for way in ways]


POOL: list[tuple[wl.Variant, list[Setup]]] = [
    (wl.Causal() & wl.Rope(), both(wl.Ragged(), "float16", 128)),
    (wl.Causal() & wl.Rope(), both(wl.Dense(layout="HND"), "bfloat16", 64)),
    (wl.Causal() & wl.Rope(interleaved=True), both(wl.Dense(), "float16", 256)),
    (wl.Rope(dim=64), both(wl.Ragged(layout="HND"), "bfloat16", 96)),
    (wl.QKNorm() & wl.Rope(), both(wl.Ragged(), "bfloat16", 128)),
    (wl.QKNorm(), both(wl.Dense(), "float16", 96)),
    (OwnKeys(), both(wl.Ragged(), "float16", 128)),
    (OwnKeys(), both(wl.Dense(layout="HND"), "bfloat16", 64, PORTABLE)),
    (OfHeads(), both(wl.Ragged(), "bfloat16", 256)),
    (wl.Rope(), both(wl.Ragged(), "float16", 72, FEW)),
]


@pytest.fixture(scope="module")
def pool() -> Any:
    return warm_up([(variant, setup) for variant, setups in POOL for setup in setups])


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "kv_heads"),
    [
        ((70, 1, 0, 33), (130, 257, 40, 0), 4),
        ((3, 500, 1), (0, 600, 1), 3),
        ((300,), (2100,), 1),
        ((64,) * 9, (64,) * 9, 8),
    ],
)
def test_both_ways_agree_with_the_oracle(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], kv_heads: int, group_size: int, pool: Any
) -> None:
    for variant, setup in pool:
        is_dense = isinstance(setup.kv_format, wl.Dense)
        rows = (q_lens[0],) * len(q_lens) if is_dense else q_lens
        case = Case(setup, rows, kv_lens, kv_heads, group_size, scale=2.0, seed=3)
        found = mismatch(variant, case)
        assert found is None, f"{variant!r} {case} {setup.tile}: {found}"


def tensors(device: Any, rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(rows, 4, 128, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, keys, 2, 128, device=device, dtype=torch.bfloat16)
    return q, k, v


def wrappers(variant: wl.Variant, *ways: str, **options: Any) -> list[wl.AttentionWrapper]:
    return [
        wl.AttentionWrapper(variant, key_transform=way, **SHAPE, **options)  # type: ignore[arg-type]
        for way in ways
    ]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def is_before(attention: wl.AttentionWrapper) -> bool:
    planned = attention.planned
    assert planned is not None
    before = planned.kernel.pretransform is not None
    told = str(attention.explain().facts["keys are transformed"])
    assert told.startswith("before attention" if before else "in attention")
    return before


def test_plans_choose_by_their_rows_and_follow_each_other(cuda: Any) -> None:
    """2,048 fused rows of a request are 1,024 rows of groups of two heads."""
    auto, fused = wrappers(wl.Causal() & wl.Rope(), "auto", "fused", device=cuda)
    auto.warm_up()
    q, k, v = tensors(cuda, 3000, 5000)
    for qo, kv, before in (
        ([0, 1100, 2200], [0, 1500, 2600], True),
        ([0, 100, 120], [0, 1500, 1520], False),
        ([0, 3000], [0, 5000], True),
        ([0, 0, 1024], [0, 0, 1024], True),
        ([0], [0], False),
        ([0, 1500, 1501, 3000], [0, 0, 1, 3000], False),  # 1,000 rows on average
        ([0, 1024], [0, 0], False),  # no keys
        ([0, 1030, 2060], [0, 1030, 2060], True),
    ):
        for wrapper in (auto, fused):
            with wl.forbid_compilation() if wrapper is auto else torch.no_grad():
                wrapper.plan(qo, kv)
        assert is_before(auto) is before and not is_before(fused)
        for _ in range(2):
            got, sums = auto.run(q[: qo[-1]], (k, v), return_lse=True)
            expected, expected_sums = fused.run(q[: qo[-1]], (k, v), return_lse=True)
            close(got, expected)
            close(sums, expected_sums)


def test_one_call_pretransforms_keys_of_long_prefills(cuda: Any) -> None:
    q, k, v = torch.randn(3, 2, 2304, 2, 128, device=cuda, dtype=torch.float16)
    variant = wl.Causal() & wl.Rope(interleaved=True)
    lens = [2304, 1000]
    got = wl.attention(q, k, v, variant=variant, kv_lens=lens)
    fused = wl.AttentionWrapper(
        variant, kv_format=wl.Dense(), num_q_heads=2, head_dim=128, device=cuda,
        key_transform="fused",
    )  # fmt: skip
    fused.plan([0, 2304, 4608], [0, 2304, 3304])
    close(got, fused.run(q, (k, v)))


def test_a_captured_run_pretransforms_what_its_tensors_then_hold(cuda: Any) -> None:
    before, fused = wrappers(OwnKeys(), "before", "fused", device=cuda)
    q, k, v = tensors(cuda, 700, 900)
    per_key, per_head = torch.rand(2, 500, device=cuda), torch.rand(2, device=cuda)
    for wrapper in (before, fused):
        wrapper.plan([0, 300, 700], [0, 400, 900], per_key=per_key, per_head=per_head)
    before.run(q, (k, v))
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        captured = [before.run(q, (k, v), gain=gain) for gain in (0.5, 2.0)]
    for seed in range(4):
        torch.manual_seed(seed)
        for tensor in (q, k, v):
            tensor.normal_()
        per_head.uniform_()
        noise = [torch.full((400, 2, 128), torch.nan, device=cuda) for _ in range(8)]
        graph.replay()
        del noise
        for gain, got in zip((0.5, 2.0), captured, strict=True):
            close(got, fused.run(q, (k, v), gain=gain))
            close(before.run(q, (k, v), gain=gain), got)


def test_inputs_of_a_run_reach_the_kernel_before(cuda: Any) -> None:
    before, fused = wrappers(wl.Causal() & wl.QKNorm() & wl.Rope(), "before", "fused", device=cuda)
    q, k, v = tensors(cuda, 200, 300)
    for wrapper in (before, fused):
        wrapper.plan([0, 200], [0, 300])
    for theta in (10000.0, 100.0, 100.0, 500000.0):
        weights: dict[str, Any] = {
            "q_weight": torch.rand(128, device=cuda),
            "k_weight": torch.rand(128, device=cuda),
        }
        got, expected = (x.run(q, (k, v), rope_theta=theta, **weights) for x in (before, fused))
        close(got, expected)


def test_layers_on_two_streams_do_not_share_what_they_pretransform(cuda: Any) -> None:
    before, fused = wrappers(wl.Causal() & wl.Rope(), "before", "fused", device=cuda)
    layers = [tensors(cuda, 1500, 1500) for _ in range(4)]
    side = torch.cuda.Stream(cuda)
    expected = []
    for wrapper in (before, fused):
        wrapper.plan([0, 1500], [0, 1500])
    for q, k, v in layers:
        expected.append(fused.run(q, (k, v)))
    torch.cuda.synchronize()
    found = []
    for i, (q, k, v) in enumerate(layers * 3):
        with torch.cuda.stream(side if i % 2 else torch.cuda.current_stream(cuda)):
            torch.cuda._sleep(200_000)
            found.append(before.run(q, (k, v)))
    torch.cuda.synchronize()
    for i, got in enumerate(found):
        close(got, expected[i % len(layers)])
        assert torch.equal(got, found[i % len(layers)])


def test_plans_by_the_device_transform_in_attention(cuda: Any) -> None:
    bounds = wl.Bounds(max_requests=1, max_q_rows=1200, max_kv_len=1200)
    options: dict[str, Any] = {**SHAPE, "num_kv_heads": 1, "device": cuda, "bounds": bounds}
    auto, before = (
        wl.AttentionWrapper(wl.Causal() & wl.Rope(), key_transform=way, **options)
        for way in ("auto", "before")
    )
    q = torch.randn(1200, 4, 128, device=cuda, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1200, 1, 128, device=cuda, dtype=torch.bfloat16)
    ends = torch.tensor([0, 1200], dtype=torch.int32, device=cuda)
    for wrapper in (auto, before):
        wrapper.plan(ends, ends)
    assert auto.planned is not None and auto.planned.by == "the device"
    assert not is_before(auto) and is_before(before)
    close(auto.run(q, (k, v)), before.run(q, (k, v)))


def test_what_cannot_be_pretransformed_is_refused(cuda: Any) -> None:
    bounds = wl.Bounds(max_requests=1, max_q_rows=8, max_kv_len=8, max_blocks=8)
    refused: tuple[tuple[str, dict[str, Any]], ...] = (
        ("Paged", {"kv_format": wl.Paged(16)}),
        ("8 bits", {"kv_dtype": "float8_e4m3fn"}),
        ("cuda_graph", {"cuda_graph": True, "bounds": bounds}),
        ("batch_invariant", {"batch_invariant": True}),
    )
    for part, options in refused:
        with pytest.raises(ArgumentError, match=f"cannot be 'before': .*{part}"):
            wrappers(wl.Rope(), "before", device=cuda, **options)
