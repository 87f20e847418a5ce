"""Prefill and decode in one launch of the portable template compile for every architecture."""

from __future__ import annotations

import pytest
from support.query_rope import QueryRope

import warploom as wl
from warploom.codegen.attention.portable import MOST_REGISTERS
from warploom.codegen.attention.templates import TALL
from warploom.codegen.compilers.arch import ARCHS, Arch
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype, kv_dtype
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.scheduler.model.layout import c_structs

REGISTERS = 65_536  # of a multiprocessor
FORMATS: list[KVFormat] = [wl.Ragged(), wl.Paged(16), wl.Composed(16)]
KINDS = [
    (wl.Causal(), None),
    (wl.Causal() & wl.SoftCap(30.0), None),
    (wl.Causal() & QueryRope(), None),
    (wl.Causal(), "float8_e4m3fn"),
    (wl.Causal(), "int8"),
]
TILES = [
    TileConfig(64, 32, 4, 2, decode=TileConfig(16, 64, 2, 2)),
    TileConfig(64, 32, 4, 2, decode=TileConfig(8, 64, 2, 2)),
    TileConfig(128, 32, 8, 2, decode=TileConfig(16, 64, 4, 2)),
]


def covering(arch: Arch, kv_format: KVFormat) -> tuple[AttentionSpec, TileConfig]:
    """What an architecture compiles for a format: each of these once with every kind and tile.

    An architecture has three of the five kinds, as many as there are formats.
    """
    i, j = list(ARCHS.values()).index(arch), FORMATS.index(kv_format)
    variant, stored = KINDS[(i + 2 * j) % len(KINDS)]
    narrow = None if stored is None else kv_dtype(stored)
    spec = AttentionSpec(trace(variant), 128, 128, dtype("bfloat16"), kv_format, narrow)
    fitting = [x for x in TILES if TALL.shared_bytes(spec, x) <= arch.shared_per_cta]
    return spec, fitting[(i + j) % len(fitting)]


def check(arch: Arch, spec: AttentionSpec, tile: TileConfig) -> None:
    """It compiles without local memory, and an SM holds as many CTAs as were computed."""
    source = TALL.kernel(spec, tile).render("cuda", c_structs(spec.kv_format.composed, roles=True))
    made, shape = run_nvrtc(source.text, arch, source.name), TALL.launch(spec, tile, arch)
    used = read_resources(made.cubin)
    assert used.local_bytes == made.spill_bytes == 0
    assert used.max_threads == shape.threads and used.registers <= MOST_REGISTERS
    assert shape.ctas_per_sm >= 1
    assert used.registers * shape.threads * shape.ctas_per_sm <= REGISTERS


@pytest.mark.some(7)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda found: type(found).__name__)
@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_nothing_spills(arch: Arch, kv_format: KVFormat) -> None:
    check(arch, *covering(arch, kv_format))


STREAMED = wl.Causal() & wl.SlidingWindow(1000, sinks=4)
OTHERS: dict[str, tuple[Variant, KVFormat, str, str | None, TileConfig, tuple[str, str]]] = {
    "blocks": (
        *(wl.Causal(), wl.BlockSparse(block=(16, 32)), "float16", None, TILES[0]),
        ("sm_80", "sm_90a"),
    ),
    "small blocks, cap": (
        *(wl.Causal() & wl.SoftCap(30.0), wl.BlockSparse(block=(7, 5)), "bfloat16", None),
        *(TILES[1], ("sm_89", "sm_100")),
    ),
    "8-bit blocks": (
        *(wl.Causal(), wl.BlockSparse(block=(16, 8)), "bfloat16", "float8_e4m3fn", TILES[2]),
        ("sm_86", "sm_90a"),
    ),
    "ring": (STREAMED, wl.Rolling(4096, 4), "bfloat16", None, TILES[2], ("sm_80", "sm_87")),
    "places in a ring, rope": (
        *(wl.Causal() & wl.Rope(), wl.Rolling(4096, 4, positions="cache"), "float16", None),
        *(TILES[0], ("sm_87", "sm_100")),
    ),
    "8-bit ring": (
        *(STREAMED, wl.Rolling(4096, 4), "float16", "int8", TILES[1]),
        ("sm_89", "sm_90a"),
    ),
    "8-bit pages, scales": (
        *(wl.Causal() & wl.TokenKVScale(), wl.Paged(1, layout="HND"), "float16", "float8_e5m2"),
        *(TILES[0], ("sm_80", "sm_120")),
    ),
}


@pytest.mark.some(2)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("which", range(2))
@pytest.mark.parametrize("name", OTHERS)
def test_other_storage_spills_nothing_on_two_architectures(name: str, which: int) -> None:
    variant, kv_format, element, stored, tile, archs = OTHERS[name]
    narrow = None if stored is None else kv_dtype(stored)
    spec = AttentionSpec(trace(variant), 128, 128, dtype(element), kv_format, narrow)
    check(ARCHS[archs[which]], spec, tile)


def test_each_format_compiles_with_each_kind_and_each_tile() -> None:
    cases = [
        (covering(arch, kv_format), kv_format) for arch in ARCHS.values() for kv_format in FORMATS
    ]
    kinds = {(kv_format, spec.variant, spec.kv_dtype) for (spec, _), kv_format in cases}
    assert len(kinds) == len(FORMATS) * len(KINDS)
    assert len({(kv_format, tile) for (_, tile), kv_format in cases}) == len(FORMATS) * len(TILES)
