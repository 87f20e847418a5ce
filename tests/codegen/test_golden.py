"""Rendered kernels, byte by byte, and that each of them compiles.

A diff in tests/golden is how a change of templates, lowering or analysis is reviewed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import warploom as wl
from warploom.codegen.attention.templates import render_cpu, render_cuda
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.hostcc import compile_cpp, host_target
from warploom.codegen.compilers.nvrtc import compile_cuda
from warploom.codegen.pretransform import PretransformSpec
from warploom.codegen.source import KernelSource, TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.errors import NoCudaCompiler, NoHostCompiler
from warploom.scheduler.model.layout import c_structs

CPU_TILE = TileConfig(32, 64, warps=1, stages=1)
ROLES_TILE = TileConfig(48, 128, 1, 1, decode=TileConfig(12, 64, 1, 1))
GPU_TILE = TileConfig(128, 64)
HOPPER_TILE = TileConfig(128, 128, 8, 2, "hopper", 1)

# name: variant, head dimension, dtype, KV format
SPECS: dict[str, tuple[Variant, int, str, KVFormat]] = {
    "causal_bf16_dense": (wl.Causal(), 128, "bfloat16", wl.Dense()),
    "softcap_window_bf16_paged": (
        wl.SoftCap(50.0) & wl.SlidingWindow(4096, right=0),
        128,
        "bfloat16",
        wl.Paged(16),
    ),
    "qknorm_rope_alibi_f16_ragged": (
        wl.QKNorm() & wl.Rope() & wl.Alibi() & wl.Causal(),
        64,
        "float16",
        wl.Ragged(),
    ),
    "sigmoid_prefix_f32_blocks": (
        wl.FlashSigmoid() & wl.PrefixLM(),
        64,
        "float32",
        wl.BlockSparse((16, 8)),
    ),
    # a mask by positions, keys in another layout, and fields that logits read
    "causal_rope_softcap_bf16_paged": (
        wl.Causal() & wl.Rope() & wl.SoftCap(30.0),
        128,
        "bfloat16",
        wl.Paged(16, layout="HND"),
    ),
}
FILES = (
    "causal_bf16_dense_cpu.cpp",
    "sigmoid_prefix_f32_blocks_cpu.cpp",
    "causal_bf16_dense_roles.cpp",
    "qknorm_rope_alibi_f16_ragged_cuda.cu",
    "softcap_window_bf16_paged_cuda.cu",
    "causal_rope_softcap_bf16_paged_hopper.cu",
    "qknorm_rope_alibi_f16_ragged_pretransform.cu",
)


def render(file: str) -> KernelSource:
    name, _, target = file.partition(".")[0].rpartition("_")
    variant, head_dim, element, kv_format = SPECS[name]
    spec = AttentionSpec(trace(variant), head_dim, head_dim, dtype(element), kv_format)
    if target == "pretransform":
        return PretransformSpec.of(spec, 8).render("cuda", c_structs())
    if target == "roles":
        return render_cpu(spec, ROLES_TILE, c_structs(roles=True))
    if target == "cpu":
        return render_cpu(spec, CPU_TILE, c_structs())
    return render_cuda(spec, HOPPER_TILE if target == "hopper" else GPU_TILE, c_structs())


@pytest.mark.golden
@pytest.mark.parametrize("file", FILES)
def test_rendered_source(file: str, golden: Callable[[str, str], None]) -> None:
    golden(file, render(file).code)


@pytest.mark.parametrize("file", FILES)
def test_rendered_source_is_short_and_names_itself(file: str) -> None:
    source = render(file)
    assert source.text.startswith(f"// {source.name}")
    without_tables = re.sub(r"  struct SharedMemory {.*?};\n", "", source.code, flags=re.S)
    without_tables = without_tables.replace(c_structs(), "")
    assert without_tables.count("\n") <= 200


@pytest.mark.parametrize("file", FILES)
def test_rendering_is_the_same_in_any_order(file: str) -> None:
    others = [render(other).code for other in reversed(FILES)]
    assert render(file).code == others[len(FILES) - 1 - FILES.index(file)]


@pytest.mark.parametrize("file", [file for file in FILES if file.endswith(".cpp")])
def test_host_source_compiles(file: str) -> None:
    try:
        host = host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))
    assert compile_cpp(render(file), host)


@pytest.mark.nvrtc
@pytest.mark.parametrize("file", [file for file in FILES if file.endswith(".cu")])
def test_cuda_source_compiles(file: str) -> None:
    arch = ARCHS["sm_90a" if file.endswith("_hopper.cu") else "sm_80"]
    try:
        assert compile_cuda(render(file).text, arch, file)
    except NoCudaCompiler as error:
        pytest.skip(str(error))
