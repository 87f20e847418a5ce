"""Keys that a kernel transforms before attention: when, what is refused, and the right numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.emulator import Emulator
from support.pretransformed_variants import OfHeads, OwnKeys

import warploom as wl
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.pretransform import PretransformSpec
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.dtypes import float16
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.errors import ArgumentError
from warploom.runtime.declaring import wrapper_options
from warploom.runtime.launching import kernels as kernels_module
from warploom.runtime.launching.kernels import Kernels
from warploom.runtime.launching.pretransformed_keys import (
    KeyTransform,
    Way,
    obstacle_to_pretransform,
    pretransform_rows,
    reason_for_fused,
)
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch

TALL = TileConfig(64, 32, 2, 2)
FEW = TileConfig(16, 32, 2, 2)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernels]:
    """Makes the kernels of a variant for an H200, of which none need be built."""
    facts = SimpleNamespace(arch=ARCHS["sm_90a"], num_sms=132)
    monkeypatch.setattr(kernels_module, "cuda_facts", lambda _: facts)

    def make(variant: wl.Variant, always: bool = False, dim: int = 128) -> Kernels:
        spec = AttentionSpec(trace(variant), dim, dim, float16, wl.Ragged())
        return Kernels(spec, torch.device("cuda", 0), PretransformSpec.of(spec, 16), always)

    return make


def test_long_prefills_have_tiles_whose_keys_come_pretransformed(
    hopper: Callable[..., Kernels],
) -> None:
    rope = hopper(wl.Causal() & wl.Rope())
    for rows, may_pretransform in ((1, True), (1024, True), (8192, False)):
        assert not rope.choose(rows, 256, rows, may_pretransform).pretransformed_keys
    choice = rope.choose(8192, 256, 8192)
    assert choice.pretransformed_keys and choice.tile.template == "hopper"
    text = rope.source(choice).text
    assert "kHasKeyTransform" not in text and "kHasQueryTransform" in text
    assert [source.labels[0][1] for source in rope.sources(choice)] == ["hopper", "pretransform"]
    assert len(rope.sources(rope.choose(1024, 256, 1024))) == 1
    assert all(x.pretransformed_keys for x in hopper(wl.Rope(), always=True).candidates())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("variant", [wl.Rope(), wl.QKNorm(), wl.QKNorm() & wl.Rope()])
def test_every_tile_that_can_be_chosen_is_a_candidate(
    hopper: Callable[..., Kernels], variant: wl.Variant, dim: int
) -> None:
    kernels = hopper(wl.Causal() & variant, dim=dim)
    candidates = kernels.candidates()
    lengths = [1, 16, 100, 512, 768, 2048, 3000, 8192, 10**5]
    for rows, items, keys in product(lengths, (1, 20, 400, 10**5), lengths):
        assert kernels.choose(rows, items, keys) in candidates


@pytest.mark.parametrize(
    ("variant", "rows"),
    [(wl.Rope(), 2048), (wl.QKNorm(), 768), (wl.QKNorm() & wl.Rope(), 512), (wl.Causal(), 2048)],
)
def test_rows_decide_and_what_the_transform_takes(
    hopper: Callable[..., Kernels], variant: wl.Variant, rows: int
) -> None:
    kernels = hopper(variant)
    assert pretransform_rows(kernels.spec_of(kernels.choose(1))) == rows
    assert not kernels.choose(1).pretransformed_keys
    if not isinstance(variant, wl.Causal):
        assert kernels.choose(rows).pretransformed_keys
        assert not kernels.choose(rows - 0.1).pretransformed_keys
        assert not kernels.choose(rows, may_pretransform=False).pretransformed_keys


def before(kv_format: KVFormat, dtype: str, dim: int, dim_v: int, tile: TileConfig) -> Setup:
    return Setup(kv_format, dtype, dim, dim_v, tile=tile, key_transform="before")


CASES: dict[str, tuple[wl.Variant, Setup]] = {
    "half": (wl.Causal() & wl.Rope(), before(wl.Dense(layout="HND"), "float16", 64, 64, TALL)),
    "pairs": (wl.Rope(interleaved=True), before(wl.Ragged(), "bfloat16", 32, 32, TALL)),
    "odd halves": (wl.Rope(), before(wl.Ragged(layout="HND"), "float16", 72, 32, TALL)),
    "norm": (wl.QKNorm() & wl.Rope(dim=64), before(wl.Ragged(), "float16", 96, 32, TALL)),
    "own": (OwnKeys(), before(wl.Ragged(), "float16", 32, 32, FEW)),
    "heads": (OfHeads(), before(wl.Dense(), "bfloat16", 160, 32, FEW)),
}


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrappers of the CPU may pretransform keys: their kernels are emulated."""
    monkeypatch.setattr(wrapper_options, "obstacle_to_pretransform", lambda *_: None)


@pytest.mark.some(2)
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("name", CASES)
def test_attention_over_pretransformed_keys_agrees_with_the_oracle(
    emulator: Emulator, name: str
) -> None:
    variant, setup = CASES[name]
    for emulator.order, q_lens, kv_lens, heads in (
        (0, (40, 0, 3, 70), (70, 33, 0, 81), (4, 1)),
        (1, (3, 3, 3), (1, 40, 20), (2, 2)),
        (0, (5,), (33,), (3, 1)),
    ):
        if isinstance(setup.kv_format, wl.Dense):
            q_lens = (q_lens[0],) * len(q_lens)
        case = Case(setup, q_lens, kv_lens, *heads, scale=2.0, seed=3)
        found = mismatch(variant, case)
        assert found is None, f"{case}: {found}"


@pytest.mark.usefixtures("anywhere")
def test_inputs_of_a_run_and_new_plans_reach_both_kernels(emulator: Emulator) -> None:
    declared: dict[str, Any] = {"num_q_heads": 2, "head_dim": 32, "dtype": "bfloat16"}
    pretransformed, fused = (
        wl.AttentionWrapper(
            OwnKeys(per_key=torch.rand(4, 100), per_head=torch.rand(2)), device="cpu",
            tile=TALL, key_transform=way, **declared,
        )
        for way in ("before", "fused")
    )  # fmt: skip
    pretransformed._inputs.bind(fused._inputs.tensors)
    q, k, v = torch.randn(3, 100, 2, 32, dtype=torch.bfloat16)
    for qo, kv in (([0, 9], [0, 60]), ([0, 4, 4, 30], [0, 50, 50, 90]), ([0], [0])):
        for wrapper in (pretransformed, fused):
            wrapper.plan(qo, kv)
        rows = q[: qo[-1]]
        runs: tuple[dict[str, Any], ...] = ({}, {"gain": 2.0}, {"per_head": torch.rand(2)}, {})
        for given in runs:
            got, expected = (x.run(rows, (k, v), **given) for x in (pretransformed, fused))
            torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.usefixtures("anywhere", "emulator")
def test_a_program_lists_what_a_run_launches_in_order() -> None:
    ways: dict[Way, list[str]] = {
        "before": ["pretransform", "portable"], "fused": ["portable"], "auto": ["portable"],
    }  # fmt: skip
    for way, kinds in ways.items():
        wrapper = wl.AttentionWrapper(
            wl.Rope(), num_q_heads=2, head_dim=32, dtype="bfloat16", device="cpu",
            tile=TALL, key_transform=way,
        )  # fmt: skip
        unplanned = wrapper.program
        assert unplanned is None
        wrapper.plan([0, 9], [0, 60])
        program = wrapper.program
        assert program is not None and wrapper.choice is not None
        assert [one.kind for one in program.passes] == kinds
        assert program.attention.choice == wrapper.choice
        assert [one.choice for one in program.before] == [None] * len(program.before)
        assert program.attention.kernel.source.name.startswith("portable_Rope")
        params = [one.params for one in program.passes]
        assert len({id(block) for block in params}) == len(kinds)


def refused(kv_format: KVFormat | None = None, **options: Any) -> str | None:
    traced = wl.AttentionWrapper(
        options.pop("variant", wl.Rope()), kv_format=kv_format, num_q_heads=1, head_dim=64,
        dtype="float16", kv_dtype=options.pop("kv_dtype", None), device="cpu",
    ).spec  # fmt: skip
    given = {"backend": "cuda", "cuda_graph": False, "batch_invariant": False, **options}
    return obstacle_to_pretransform(traced, **given)


def test_what_cannot_be_pretransformed_says_why() -> None:
    assert refused() is None
    assert refused(wl.Dense(layout="HND")) is None
    for found, part in (
        (refused(variant=wl.Causal()), "transforms no keys"),
        (refused(backend="cpu"), "back end"),
        (refused(wl.Paged(16)), "Paged"),
        (refused(wl.BlockSparse(block=(1, 8))), "BlockSparse"),
        (refused(wl.Composed(16)), "Composed"),
        (refused(kv_dtype="float8_e4m3fn"), "8 bits"),
        (refused(cuda_graph=True), "cuda_graph"),
        (refused(batch_invariant=True), "batch_invariant"),
    ):
        assert found is not None and part in found


def test_a_way_that_cannot_be_had_is_refused() -> None:
    shape: dict[str, Any] = {"num_q_heads": 1, "head_dim": 64, "device": "cpu", "dtype": "float16"}
    with pytest.raises(ArgumentError, match=r"key_transform.*cannot be 'before': the back end"):
        wl.AttentionWrapper(wl.Rope(), key_transform="before", **shape)
    with pytest.raises(ArgumentError, match="cannot be 'before'"):
        wl.AttentionWrapper(wl.Rope(), tile=TALL, key_transform="before", **shape)
    with pytest.raises(ArgumentError, match="expected one of 'auto', 'fused', 'before'"):
        wl.AttentionWrapper(wl.Rope(), key_transform="early", **shape)  # type: ignore[arg-type]
    for way in ("auto", "fused"):
        wl.AttentionWrapper(wl.Rope(), key_transform=way, **shape)  # type: ignore[arg-type]


def test_who_gives_a_tile_has_fused_keys_unless_asked() -> None:
    assert KeyTransform.of("auto", True, None).way == "fused"
    assert KeyTransform.of("before", True, None).way == "before"


def test_kernels_of_one_tile_differ_by_where_keys_are_transformed(
    hopper: Callable[..., Kernels],
) -> None:
    kernels = hopper(wl.Rope(), always=True)
    given = kernels.given(TALL)
    assert given.pretransformed_keys and given.tile == TALL
    fused, plain = (kernels.source(choice).text for choice in (TileChoice(TALL), given))
    assert "kHasKeyTransform" in fused and "kHasKeyTransform" not in plain
    assert kernels.source(TileChoice(TALL)).text == fused
    assert not hopper(wl.Rope()).given(TALL).pretransformed_keys


def test_who_limits_sms_or_memory_has_fused_keys_unless_asked() -> None:
    assert reason_for_fused(None, None) is None
    for limits, part in (((4, None), "sm_limit"), ((None, torch.zeros(1)), "workspace")):
        reason = reason_for_fused(*limits)
        auto = KeyTransform.of("auto", False, None, reason)
        assert not auto.may_be_before and part in auto.explained(False, 8192)
        assert KeyTransform.of("before", False, None, reason).may_be_before


def test_the_way_is_told_with_its_reason() -> None:
    auto = KeyTransform.of("auto", False, None)
    mean = "fused query rows per request on average are"
    assert auto.explained(True, 8192).endswith(f": 8192 {mean} 2048 or more")
    assert auto.explained(False, 100).endswith(f": 100 {mean} fewer than 2048")
    assert auto.explained(True, 8192).startswith("before attention, once for each key: ")
    assert KeyTransform.of("fused", False, None).explained(False, 8192).endswith(": asked for")
    given = KeyTransform.of("auto", True, None)
    reason = ": a tile was given, and not key_transform='before'"
    assert given.explained(False, 8192).endswith(reason)
    assert KeyTransform.of("auto", False, "so it is").explained(False, 8192).endswith(": so it is")
