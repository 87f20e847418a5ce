"""Prefill and decode in one launch, run by fibers: any kernel, any mix, CTAs in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.emulator import CTAS, Emulator
from support.query_rope import QueryRope
from support.sampling import few
from support.short_lists import short_ones_count

import warploom as wl
from warploom.codegen.attention.templates import template_of
from warploom.codegen.choice.role_choice import role_choices
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype, kv_dtype
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch

SM90 = arch_named("sm_90a")
# The first of each is in the first example of every run, the others are in those that are drawn.
TURNED = [
    TileConfig(128, 128, 8, 2, "hopper", 2, decode=TileConfig(8, 192, 6, 2)),  # as chosen
    TileConfig(64, 64, 4, 2, "hopper", 2, decode=TileConfig(8, 96, 3, 2)),
]
TALL = [
    TileConfig(64, 64, 4, 2, "hopper", 2, decode=TileConfig(16, 64, 2, 2)),
    TileConfig(128, 64, 8, 2, "hopper", 1, decode=TileConfig(16, 96, 3, 2)),
]
PORTABLE = [
    TileConfig(64, 64, 4, 2, decode=TileConfig(8, 64, 2, 2)),
    TileConfig(64, 64, 4, 2, decode=TileConfig(16, 64, 2, 2)),
    TileConfig(128, 32, 8, 2, decode=TileConfig(16, 128, 4, 2)),
]
TILES = {
    "8 rows": TURNED,
    "16 rows": TALL,
    "portable": PORTABLE,
    "composed": [TURNED[1], PORTABLE[1], TALL[1], *PORTABLE[::2]],
}
PAGES: list[KVFormat] = [
    *(wl.Paged(16), wl.Ragged(), wl.Paged(1), wl.Paged(3), wl.Paged(8, layout="HND")),
    *(wl.Paged(64), wl.BlockSparse(block=(16, 32)), wl.Rolling(64, 4, positions="cache")),
]
COMPOSED: list[KVFormat] = [wl.Composed(16), wl.Composed(1), wl.Composed(3), wl.Composed(8)]
VARIANTS: list[Variant] = [
    wl.Causal(),
    wl.Variant(),
    wl.Causal() & wl.SoftCap(5.0),
    wl.Causal() & wl.Alibi(),
    wl.Causal() & wl.SlidingWindow(40),
    wl.Alibi() & wl.FlashSigmoid(bias=-2.0),
    wl.Causal() & QueryRope(),
    wl.Causal() & wl.Rope(),
    wl.Causal() & wl.QKNorm(),
    wl.Causal() & wl.AttentionSink(),
    wl.PrefixLM(),
]
DIMS = [(128, 128), (64, 64), (96, 96), (64, 40), (40, 72)]
STORED = [None, None, "float8_e4m3fn", "float8_e5m2", "int8"]
GROUPS = (4, 8, 1, 16)


def spec_of(variant: Variant, setup: Setup) -> AttentionSpec:
    stored = None if setup.kv_dtype is None else kv_dtype(setup.kv_dtype)
    dims = setup.head_dim, setup.head_dim_v
    return AttentionSpec(trace(variant), *dims, dtype(setup.dtype), setup.kv_format, stored)


def is_possible(kernel: tuple[Variant, Setup]) -> bool:
    variant, setup = kernel
    assert setup.tile is not None
    if setup.kv_dtype is not None and (setup.head_dim % 16 or setup.head_dim_v % 16):
        return False
    spec, template = spec_of(variant, setup), template_of(setup.tile)
    if template.obstacle(spec, setup.tile) is not None:
        return False
    return template.launch(spec, setup.tile, SM90).shared_bytes <= SM90.shared_per_cta


def kernels(kind: str) -> st.SearchStrategy[tuple[Variant, Setup]]:
    formats = COMPOSED if kind == "composed" else PAGES
    setups = st.builds(
        lambda kv_format, element, dims, tile, stored: Setup(
            kv_format, element, *dims, tile=tile, kv_dtype=stored
        ),
        *(st.sampled_from(x) for x in (formats, ["bfloat16", "float16"], DIMS, TILES[kind])),
        st.sampled_from(STORED),
    )
    return st.tuples(st.sampled_from(VARIANTS), setups).filter(is_possible)


def lengths(setup: Setup, group: int, mix: str) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Rows and keys of each request; rows that make few tiles, since each element takes a while."""
    assert setup.tile is not None and setup.tile.decode is not None
    page, tiles = setup.kv_format.block_kv or 16, (setup.tile, setup.tile.decode)
    borders = (n + d for n in (page, *(tile.keys for tile in tiles)) for d in (-1, 0, 1))
    keys = st.one_of(st.sampled_from((130, 0, 1, *borders)), st.integers(0, 260))
    most = setup.tile.rows + 8
    fused = st.one_of(st.sampled_from((70, 17, 33, setup.tile.rows + 1)), st.integers(0, most))
    decode = st.tuples(st.sampled_from((1, 1, 0, 2, 4)), st.one_of(st.just(500), keys))
    prefill = st.tuples(fused.map(lambda rows: -(-rows // group)), keys)
    decodes, prefills = (
        st.lists(one, min_size=2, max_size=4) if mix in (name, "both") else st.just([])
        for name, one in (("decodes", decode), ("prefills", prefill))
    )
    return st.builds(list.__add__, decodes, prefills).flatmap(st.permutations)


@st.composite
def batches(draw: Any, setup: Setup, group: int, mix: str) -> Case:
    """Few CTAs have both roles, claim what is shared, or may not work at all."""
    q_lens, kv_lens = zip(*draw(lengths(setup, group, mix)), strict=True)
    limit, order = draw(st.none() | st.integers(1, CTAS)), draw(st.integers(2, 1000))
    heads, scale = draw(st.integers(1, 2)), draw(st.sampled_from((1.0, 4.0)))
    return Case(setup, q_lens, kv_lens, heads, group, scale, seed=order, sm_limit=limit)


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", TILES)
@settings(
    max_examples=few(2, of=12),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_mix_is_right_in_any_order(emulator: Emulator, kind: str, data: st.DataObject) -> None:
    """Of each kernel, which takes longer to compile than to run, one batch of either role alone
    and one of both. The plans are verified; CTAs take turns, and their warps, in a random order."""
    variant, setup = data.draw(kernels(kind), label="kernel")
    assert setup.tile is not None and setup.tile.decode is not None
    fitting = [size for size in GROUPS if size <= setup.tile.decode.rows]
    groups = data.draw(st.permutations(fitting), label="groups")
    for mix, group in zip(("both", "decodes", "prefills"), groups, strict=False):
        case = data.draw(batches(setup, group, mix), label=mix)
        emulator.order = case.seed
        with short_ones_count(are_cut=not data.draw(st.booleans(), label="whole")):
            found = mismatch(variant, case)
        assert found is None, f"{case}: {found}"


def test_eight_rows_are_drawn_as_they_are_chosen() -> None:
    variant, setup = VARIANTS[0], Setup(PAGES[0], "bfloat16", *DIMS[0])
    choices = role_choices(spec_of(variant, setup), SM90, GROUPS[0])
    assert choices[0].tile == TURNED[0]
