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


@pytest.mark.some(7)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda found: type(found).__name__)
@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_nothing_spills(arch: Arch, kv_format: KVFormat) -> None:
    spec, tile = covering(arch, kv_format)
    source = TALL.kernel(spec, tile).render("cuda", c_structs(kv_format.composed, roles=True))
    made, shape = run_nvrtc(source.text, arch, source.name), TALL.launch(spec, tile, arch)
    used = read_resources(made.cubin)
    assert used.local_bytes == made.spill_bytes == 0
    assert used.max_threads == shape.threads and used.registers <= MOST_REGISTERS
    assert shape.ctas_per_sm >= 1
    assert used.registers * shape.threads * shape.ctas_per_sm <= REGISTERS


def test_each_format_compiles_with_each_kind_and_each_tile() -> None:
    cases = [
        (covering(arch, kv_format), kv_format) for arch in ARCHS.values() for kv_format in FORMATS
    ]
    kinds = {(kv_format, spec.variant, spec.kv_dtype) for (spec, _), kv_format in cases}
    assert len(kinds) == len(FORMATS) * len(KINDS)
    assert len({(kv_format, tile) for (_, tile), kv_format in cases}) == len(FORMATS) * len(TILES)
