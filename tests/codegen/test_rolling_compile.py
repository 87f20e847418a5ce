"""Kernels over rolling caches compile without spills, and differ from others by a loader alone."""

from __future__ import annotations

import pytest

import warploom as wl
from warploom.codegen.attention.templates import render_cpu, render_cuda
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.scheduler.model.layout import c_structs

RING, CACHE = wl.Rolling(4096, 4), wl.Rolling(4096, 4, positions="cache")


def spec(variant: wl.Variant, kv_format: KVFormat, head_dim: int = 128) -> AttentionSpec:
    return AttentionSpec(trace(variant), head_dim, head_dim, dtype("bfloat16"), kv_format)


def test_kernels_know_their_ring_and_others_have_no_word_of_one() -> None:
    tile = TileConfig(16, 64, 4, 3)
    for render in (render_cuda, render_cpu):
        source = render(spec(wl.Causal(), RING), tile, c_structs())
        assert "kWindow = 4096" in source.text
        assert "kSinks = 4" in source.text
        assert "rolling4096_4" in source.name
        assert "kWindow" not in render(spec(wl.Causal(), wl.Paged(1)), tile, c_structs()).text


VARIANTS = {
    "causal": wl.Causal(),
    "bias, cap": wl.Causal() & wl.Alibi() & wl.SoftCap(30.0),
    "rope": wl.Causal() & wl.Rope(),
}


@pytest.mark.some(2)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kv_format", [RING, CACHE], ids=["sequence", "cache"])
@pytest.mark.parametrize("rows", [1, 8, 64, 1000])
def test_the_tiles_that_batches_get_spill_nothing(
    arch: str, kv_format: KVFormat, rows: int
) -> None:
    for variant in VARIANTS.values():
        of = spec(variant, kv_format)
        tile = choose_tile(of, arch_named(arch), rows).tile
        source = render_cuda(of, tile, c_structs())
        compiled = run_nvrtc(source.text, arch_named(arch), source.name)
        assert compiled.spill_bytes == 0, tile
        assert read_resources(compiled.cubin).local_bytes == 0, tile
