"""The portable kernel compiles for every architecture, tile, format and hook, without spills."""

from __future__ import annotations

from typing import Any

import pytest

import warploom as wl
from warploom.codegen.attention.templates import cuda_launch, render_cuda, template_of
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import ARCHS, Arch, arch_named
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import Compiled, run_nvrtc
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype, kv_dtype
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.trace import trace
from warploom.scheduler.model.layout import c_structs


class ScaledValues(wl.Variant):
    """Value and output transforms with a reduction over lanes, and the log-sum-exp."""

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * wl.to_float(at.kv_pos + at.lane)

    def output_transform(self, o: Value, at: Position) -> Value:
        return o * wl.rsqrt(wl.sum(o * o) + 1.0) + at.lse


class ByWidth(wl.Variant):
    """A scale of values that reads the number of lanes."""

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * (at.head_dim * 0.25)


def spec(
    variant: wl.Variant | None = None,
    kv_format: KVFormat | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    element: str = "bfloat16",
    stored: str | None = None,
) -> AttentionSpec:
    return AttentionSpec(
        trace(wl.Causal() if variant is None else variant),
        head_dim,
        head_dim_v or head_dim,
        dtype(element),
        kv_format or wl.Ragged(),
        kv_dtype(stored) if stored else None,
    )


def compile_portable(of: AttentionSpec, tile: TileConfig, arch: str = "sm_90a") -> Compiled:
    source = render_cuda(of, tile, c_structs())
    return run_nvrtc(source.text, arch_named(arch), source.name)


def spilled(compiled: Compiled) -> int:
    """Bytes of local memory and of spill code; the two agree on there being none."""
    resources = read_resources(compiled.cubin)
    assert resources.registers <= 255
    return max(resources.local_bytes, compiled.spill_bytes)


ARCH_CASES = {
    "sm_80": (TileConfig(128, 64, 4, 2), spec(element="float16")),
    "sm_86": (TileConfig(64, 64, 4, 2), spec(wl.Alibi())),
    "sm_87": (TileConfig(128, 64, 4, 2), spec(element="float16", kv_format=wl.Dense())),
    "sm_89": (TileConfig(64, 32, 4, 2), spec(kv_format=wl.Paged(16))),
    "sm_90a": (TileConfig(16, 64, 4, 3), spec(kv_format=wl.Paged(1))),
    "sm_100": (TileConfig(128, 32, 4, 2), spec(kv_format=wl.BlockSparse(block=(16, 8)))),
    "sm_120": (TileConfig(64, 64, 4, 2), spec(kv_format=wl.Dense(layout="HND"), head_dim=96)),
}


@pytest.mark.some(3)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture(arch: str) -> None:
    tile, of = ARCH_CASES[arch]
    assert spilled(compile_portable(of, tile, arch)) == 0


TILES = [
    TileConfig(16, 128, 4, 2),
    TileConfig(16, 64, 2, 2),
    TileConfig(16, 16, 1, 2),
    TileConfig(8, 128, 4, 2),
    TileConfig(64, 32, 2, 2),
    TileConfig(64, 128, 4, 2),
    TileConfig(128, 32, 4, 3),
]


@pytest.mark.some(2)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows}x{tile.keys}")
def test_the_tiles_that_no_architecture_test_has(tile: TileConfig) -> None:
    assert spilled(compile_portable(spec(wl.Variant(), element="float16"), tile)) == 0


# Both 32 rows per warp, where registers are tight, and key tiles split over warps.
HOOKS = {
    "soft-cap": (wl.Causal() & wl.SoftCap(50.0), TileConfig(128, 32, 4, 2)),
    "window": (wl.Causal() & wl.SlidingWindow(100), TileConfig(128, 64, 4, 2)),
    "alibi": (wl.Causal() & wl.Alibi(), TileConfig(16, 64, 4, 3)),
    "document": (wl.DocumentMask(), TileConfig(64, 64, 4, 2)),
    "sigmoid": (wl.FlashSigmoid(bias=-2.0), TileConfig(128, 64, 4, 2)),
    "rope": (wl.Causal() & wl.Rope(), TileConfig(128, 64, 4, 2)),
    "norm": (wl.Causal() & wl.QKNorm(), TileConfig(16, 64, 4, 3)),
    "values": (ScaledValues(), TileConfig(64, 64, 4, 2)),
}


@pytest.mark.some(3)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("name", HOOKS)
def test_every_hook(name: str) -> None:
    variant, tile = HOOKS[name]
    assert spilled(compile_portable(spec(variant, wl.Paged(16)), tile)) == 0


# Where a sweep of variants, formats and architectures found spills in larger tiles.
TIGHT = {
    "sm_80": spec(wl.Causal() & wl.Alibi() & wl.DocumentMask(), wl.Paged(16)),
    "sm_89": spec(wl.SlidingWindow(100, 0) & wl.SoftCap(50.0), wl.Paged(16), head_dim=64),
    "sm_87": spec(wl.Causal() & wl.TokenKVScale(), wl.Paged(16), stored="float8_e4m3fn"),
    "sm_90a": spec(stored="float8_e4m3fn"),
    "sm_100": spec(wl.Causal() & wl.DocumentMask(), wl.BlockSparse(block=(16, 8))),
    "sm_120": spec(wl.Alibi("input")),
}


@pytest.mark.some(2)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("arch", TIGHT)
def test_what_needs_many_registers_has_a_tile_without_spills(arch: str) -> None:
    tile = choose_tile(TIGHT[arch], arch_named(arch), 1000).tile
    assert spilled(compile_portable(TIGHT[arch], tile, arch)) == 0


# Left alone, ptxas stops at 128 registers in tall tiles for sm_89 and spills.
CAPPED = {
    "alibi over pages": (wl.Causal() & wl.Alibi(), wl.Paged(16), 1000),
    "alibi ragged": (wl.Causal() & wl.Alibi(), wl.Ragged(), 64),
    "window over pages": (
        wl.Causal() & wl.SlidingWindow(100) & wl.SoftCap(30.0),
        wl.Paged(16),
        1000,
    ),
}


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("name", CAPPED)
def test_launch_bounds_give_tall_tiles_their_registers(name: str) -> None:
    variant, kv_format, rows = CAPPED[name]
    of = spec(variant, kv_format, element="float16")
    tile = choose_tile(of, arch_named("sm_89"), rows).tile
    assert spilled(compile_portable(of, tile, "sm_89")) == 0


HEAD_DIMS = {
    (64, 64): TileConfig(128, 64, 4, 2),
    (40, 72): TileConfig(16, 64, 4, 2),
    (192, 128): TileConfig(128, 64, 8, 2),
    (256, 256): TileConfig(64, 64, 4, 2),
}


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    of = spec(head_dim=dims[0], head_dim_v=dims[1])
    assert spilled(compile_portable(of, HEAD_DIMS[dims])) == 0


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
def test_shared_memory_has_room_for_listed_columns() -> None:
    of = spec(kv_format=wl.BlockSparse(block=(4, 8)), head_dim=32)
    compile_portable(of, TileConfig(64, 32, 4, 3), "sm_80")


# 8-bit keys and values: widened in registers, or, for hooks, to a tile of their own.
NARROW = {
    "decode": (wl.Causal(), TileConfig(16, 256, 8, 2), "float8_e4m3fn", "sm_90a"),
    "half": (wl.KVScale(), TileConfig(16, 64, 2, 2), "float8_e5m2", "sm_89"),
    "half, tokens": (wl.TokenKVScale(), TileConfig(64, 64, 4, 2), "float8_e4m3fn", "sm_90a"),
    "half, decode": (wl.TokenKVScale(), TileConfig(16, 128, 4, 2), "int8", "sm_80"),
    "tokens": (wl.TokenKVScale(), TileConfig(64, 64, 4, 2), "float8_e4m3fn", "sm_100"),
    "hooks": (wl.Rope() & ScaledValues(), TileConfig(16, 64, 2, 2), "float8_e4m3fn", "sm_120"),
    "before sm_89": (wl.HeadKVScale(), TileConfig(16, 128, 4, 2), "float8_e4m3fn", "sm_80"),
    "tall": (wl.Causal(), TileConfig(128, 64, 8, 2), "float8_e5m2", "sm_90a"),
    "width": (ByWidth(), TileConfig(64, 64, 4, 2), "float8_e4m3fn", "sm_90a"),
    "ints": (wl.KVScale(), TileConfig(16, 128, 4, 2), "int8", "sm_80"),
    "ints, hooks": (wl.Rope() & ScaledValues(), TileConfig(64, 64, 4, 2), "int8", "sm_90a"),
}


@pytest.mark.some(3)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("name", NARROW)
def test_narrow_keys_and_values(name: str) -> None:
    variant, tile, stored, arch = NARROW[name]
    element = "float16" if name.startswith("half") else "bfloat16"
    of = spec(variant, wl.Paged(16), 96 if name == "hooks" else 128, element=element, stored=stored)
    assert spilled(compile_portable(of, tile, arch)) == 0


def test_narrow_keys_have_tiles_of_hopper_if_those_of_128_lanes() -> None:
    for rows, dim in ((1, 128), (50, 128), (1000, 64), (1000, 256)):
        of = spec(head_dim=dim, stored="float8_e4m3fn")
        choice = choose_tile(of, arch_named("sm_90a"), rows)
        assert choice.tile.template == "portable"
    assert "8-bit keys and values of 112 and 128 lanes alone" in choice.reason
    choice = choose_tile(spec(head_dim=128, stored="float8_e4m3fn"), arch_named("sm_90a"), 1000)
    assert choice.tile.template == "hopper"


def test_few_items_have_an_sm_alone() -> None:
    choices = [choose_tile(spec(), arch_named("sm_90a"), 4, n) for n in (0.9, 4.0)]
    few, many = (choice.tile for choice in choices)
    assert few.rows == many.rows == 16
    assert few.keys > many.keys
    assert cuda_launch(spec(), few, arch_named("sm_90a")).ctas_per_sm == 1
    assert choices[0].reason != choices[1].reason


def test_rendered_source_is_short() -> None:
    of, tile = spec(wl.Causal() & wl.SoftCap(5.0)), TileConfig(128, 64)
    table = template_of(tile).memory(of, tile).struct()
    text = render_cuda(of, tile, c_structs()).text.replace(f"{table}\n", "")
    assert len(text.splitlines()) <= 150


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (128, 128), (64, 256), (256, 64), (256, 256)])
def test_a_tile_fits_every_architecture(arch: Arch, dims: tuple[int, int]) -> None:
    formats: tuple[Any, ...] = (wl.Ragged(), wl.Paged(1), wl.BlockSparse(block=(1, 1)))
    for kv_format in formats:
        of = spec(kv_format=kv_format, head_dim=dims[0], head_dim_v=dims[1])
        for rows in (1, 16, 17, 64, 65, 10_000):
            choice = choose_tile(of, arch, rows)
            tile = choice.tile
            shape = cuda_launch(of, tile, arch)
            assert shape.shared_bytes <= arch.shared_per_cta
            assert shape.ctas_per_sm >= 1
            assert arch.name in choice.reason or tile.template != "portable"


def test_the_choice_follows_the_rows_of_requests() -> None:
    rows = [
        choose_tile(spec(), arch_named("sm_80"), n).tile.rows for n in (1, 16, 17, 64, 65, 4000)
    ]
    assert rows == sorted(rows)
    assert rows[:2] == [1, 16]
    assert rows[2] == rows[3] == 64
