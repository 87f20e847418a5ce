"""Tiles at the limits of each template compile; those beyond are refused before."""

from __future__ import annotations

import pytest

import warploom as wl
from warploom.codegen.attention.templates import render_cuda, template_of
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.errors import UnsupportedSpec
from warploom.scheduler.model.layout import c_structs

HOPPER = ARCHS["sm_90a"]
RAGGED, TOKENS = wl.Ragged(), wl.Paged(1)


def spec(kv_format: KVFormat) -> AttentionSpec:
    return AttentionSpec(trace(wl.Causal()), 64, 64, dtype("bfloat16"), kv_format)


def label(value: object) -> str:
    return value.label if isinstance(value, TileConfig) else str(value)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("kv_format", "tile"),
    [
        (RAGGED, TileConfig(64, 128, 4, 2, "hopper")),
        (RAGGED, TileConfig(128, 256, 8, 2, "hopper")),
        (RAGGED, TileConfig(192, 224, 12, 2, "hopper")),
        (TOKENS, TileConfig(128, 128, 8, 2, "hopper")),
        (TOKENS, TileConfig(256, 256, 8, 2)),
        (RAGGED, TileConfig(16, 16, 1, 2)),
        (RAGGED, TileConfig(1, 48, 3, 1)),
        (RAGGED, TileConfig(1, 256, 8, 1)),
        (RAGGED, TileConfig(16, 176, 11, 2)),
        (TOKENS, TileConfig(8, 192, 12, 2)),
        (RAGGED, TileConfig(256, 64, 16, 2)),
        (RAGGED, TileConfig(1, 256, 16, 1)),
        (RAGGED, TileConfig(512, 16, 32, 2)),
        (RAGGED, TileConfig(1024, 16, 32, 2)),
        (RAGGED, TileConfig(1, 1024, 32, 1)),
    ],
    ids=label,
)
def test_the_largest_tiles_compile(kv_format: KVFormat, tile: TileConfig) -> None:
    source = render_cuda(spec(kv_format), tile, c_structs())
    assert run_nvrtc(source.text, HOPPER, source.name).cubin
    assert template_of(tile).kernel(spec(kv_format), tile).launch(HOPPER).ctas_per_sm >= 1


@pytest.mark.parametrize(
    ("kv_format", "tile", "reason"),
    [
        (RAGGED, TileConfig(64, 160, 4, 2, "hopper"), "4 warps have 128 keys at most"),
        (RAGGED, TileConfig(128, 288, 8, 2, "hopper"), "8 warps have 256 keys at most"),
        (RAGGED, TileConfig(192, 256, 12, 2, "hopper"), "12 warps have 224 keys at most"),
        (TOKENS, TileConfig(128, 160, 8, 2, "hopper"), "a warp looks up 128 keys of such blocks"),
        (RAGGED, TileConfig(64, 64, 4, 2, "hopper", 0), "queries lie in one place at least"),
        (RAGGED, TileConfig(48, 32, 3, 2), "warps are a power of two, and it has 3"),
        (RAGGED, TileConfig(192, 32, 6, 2), "warps are a power of two, and it has 6"),
        (RAGGED, TileConfig(1, 100, 4, 1), "4 are to share 100"),
        (RAGGED, TileConfig(1, 256, 4, 1), "4 are to share 256"),
        (RAGGED, TileConfig(1024, 16, 64, 2), "1024 threads at most, and it takes 2048"),
        (TOKENS, TileConfig(8, 512, 32, 2), "1024 threads at most, and it takes 1056"),
        (RAGGED, TileConfig(1, 528, 33, 1), "1024 threads at most, and it takes 1056"),
    ],
    ids=label,
)
def test_what_does_not_compile_is_refused(
    kv_format: KVFormat, tile: TileConfig, reason: str
) -> None:
    with pytest.raises(UnsupportedSpec, match=reason):
        template_of(tile).kernel(spec(kv_format), tile).launch(HOPPER)


@pytest.mark.parametrize("arch", sorted(set(ARCHS) - {"sm_90a"}))
def test_other_architectures_have_no_hopper_tiles(arch: str) -> None:
    small = TileConfig(64, 32, 4, 2, "hopper")
    with pytest.raises(UnsupportedSpec, match=rf"on {arch} .* for another architecture"):
        template_of(small).kernel(spec(RAGGED), small).launch(ARCHS[arch])
