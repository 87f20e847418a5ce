"""The kernel for one query row compiles for its hooks and formats, without spills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import warploom as wl
from warploom.codegen.attention.templates import SINGLE_ROW, cuda_launch, render_cuda
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import REGISTERS_PER_SM, arch_named
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype, float16, kv_dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.trace import trace
from warploom.errors import UnsupportedSpec
from warploom.scheduler.model.layout import c_structs


class Turned(wl.Variant):
    """A query transform that reads all of a row, an output transform, and a scale of values."""

    def query_transform(self, q: Value, at: Position) -> Value:
        return q * wl.rsqrt(wl.sum(q * q) + 1e-6)

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * wl.to_float(at.kv_pos + at.head_dim)

    def output_transform(self, o: Value, at: Position) -> Value:
        return o * wl.rsqrt(wl.sum(o * o) + 1.0) + at.lse


class Shifted(wl.Variant):
    """A value transform that is no scale."""

    def value_transform(self, v: Value, at: Position) -> Value:
        return v + 1.0


def spec(
    variant: wl.Variant, kv_format: Any, dims: tuple[int, int] = (128, 128), stored: str = ""
) -> AttentionSpec:
    narrow = kv_dtype(stored) if stored else None
    return AttentionSpec(trace(variant), *dims, dtype("bfloat16"), kv_format, narrow)


BLOCKS = wl.BlockSparse(block=(1, 8))
CASES = {
    "paged": (spec(wl.Causal(), wl.Paged(16)), "sm_90a"),
    "page of 1": (replace(spec(wl.Causal(), wl.Paged(1), (96, 96)), dtype=float16), "sm_90a"),
    "page of 5": (spec(wl.SlidingWindow(100), wl.Paged(5, layout="HND")), "sm_80"),
    "ragged": (spec(Turned(), wl.Ragged(), (64, 64)), "sm_86"),
    "dense": (spec(wl.Causal() & wl.SoftCap(30.0), wl.Dense()), "sm_87"),
    "blocks": (spec(wl.Causal() & wl.Alibi(), BLOCKS, (40, 72)), "sm_89"),
    "mask reads": (spec(wl.Causal() & wl.DocumentMask(), wl.Paged(1)), "sm_100"),
    "wide": (spec(wl.FlashSigmoid(), wl.Paged(16), (256, 256)), "sm_90a"),
    "latent": (spec(wl.AttentionSink() & wl.Causal(), wl.Paged(16), (192, 128)), "sm_120"),
    "least": (spec(wl.Causal(), wl.Ragged(), (8, 8)), "sm_120"),
    "narrow": (spec(wl.Causal(), wl.Paged(16), (64, 64)), "sm_120"),
    "odd": (spec(wl.Variant(), wl.Paged(16), (96, 96)), "sm_120"),
    "e4m3": (spec(wl.TokenKVScale(), wl.Paged(16), stored="float8_e4m3fn"), "sm_90a"),
    "e5m2": (spec(wl.HeadKVScale(), wl.Paged(16), stored="float8_e5m2"), "sm_80"),
    "int8": (spec(wl.HeadKVScale(), wl.Paged(16), stored="int8"), "sm_90a"),
}


@pytest.mark.some(6)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("name", CASES)
def test_one_row(name: str) -> None:
    of, arch = CASES[name][0], arch_named(CASES[name][1])
    tile = SINGLE_ROW.tile(of)
    shape = cuda_launch(of, tile, arch)
    source = render_cuda(of, tile, c_structs())
    compiled = run_nvrtc(source.text, arch, source.name)
    used = read_resources(compiled.cubin)
    assert max(used.local_bytes, compiled.spill_bytes) == 0
    assert used.registers * shape.threads * shape.ctas_per_sm <= REGISTERS_PER_SM


@pytest.mark.parametrize("variant", [wl.Rope(), wl.QKNorm(), Shifted()], ids=repr)
def test_hooks_that_need_staged_rows_have_tiles_of_16(variant: wl.Variant) -> None:
    of = spec(variant, wl.Paged(16))
    choice = choose_tile(of, arch_named("sm_90a"), 1)
    assert choice.tile.rows == 16
    assert "not one row, since a" in choice.reason
    with pytest.raises(UnsupportedSpec, match=r"portable 1x64.*needs staged .*16 rows"):
        render_cuda(of, TileConfig(1, 64, 4, 1), c_structs())


def test_tiles_of_one_row_are_for_requests_of_one_fused_row() -> None:
    of = spec(wl.Causal(), wl.Paged(16))
    one, two = (choose_tile(of, arch_named("sm_90a"), rows) for rows in (1, 2))
    assert (one.tile.rows, two.tile.rows) == (1, 16)
    assert "without tensor cores" in one.reason
