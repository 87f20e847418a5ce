"""Kernels that tell the largest score of each row compile without spills, in as many registers."""

from __future__ import annotations

import pytest

import warploom as wl
from warploom.codegen.attention.templates import cuda_launch, render_cuda
from warploom.codegen.compilers.arch import REGISTERS_PER_SM, arch_named
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import bfloat16
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.scheduler.model.layout import c_structs

TALL, FEW, ONE = TileConfig(128, 64), TileConfig(16, 64, 4, 2), TileConfig(1, 64, 4, 1)
GROUP, GROUPS = TileConfig(64, 128, 4, 2, "hopper", 2), TileConfig(128, 128, 8, 2, "hopper", 1)
WIDE, THREE = TileConfig(128, 64, 8, 2, "hopper", 1), TileConfig(192, 96, 12, 3, "hopper", 2)
CASES: dict[str, tuple[str, TileConfig, wl.Variant, KVFormat, int]] = {
    "128 rows": ("sm_80", TALL, wl.Causal(), wl.Paged(16), 128),
    "64 rows, bias": ("sm_86", TileConfig(64, 64), wl.Causal() & wl.Alibi(), wl.Ragged(), 128),
    "64 rows, sinks": ("sm_80", TileConfig(64, 64), wl.AttentionSink(), wl.Dense(), 64),
    "16 rows": ("sm_80", FEW, wl.Causal() & wl.Alibi(), wl.Ragged(), 128),
    "16 rows, composed": ("sm_80", FEW, wl.Causal(), wl.Composed(16), 128),
    "one row": ("sm_90a", ONE, wl.Causal(), wl.Paged(16), 128),
    "one group": ("sm_90a", GROUP, wl.Causal() & wl.SoftCap(30.0), wl.Composed(16), 128),
    "two groups": ("sm_90a", GROUPS, wl.Causal(), wl.Ragged(), 128),
    "two groups, bias": ("sm_90a", GROUPS, wl.Causal() & wl.Alibi(), wl.Paged(1), 128),
    "256 lanes": ("sm_90a", WIDE, wl.Causal() & wl.Rope(), wl.Paged(1), 256),
    "three groups": ("sm_90a", THREE, wl.Causal(), wl.Ragged(), 64),
}


@pytest.mark.some(3)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("name", CASES)
def test_nothing_spills(name: str) -> None:
    arch_name, tile, variant, kv_format, dim = CASES[name]
    arch = arch_named(arch_name)
    registers = []
    for tells in (False, True):
        spec = AttentionSpec(trace(variant), dim, dim, bfloat16, kv_format, max_scores=tells)
        source = render_cuda(spec, tile, c_structs(kv_format.composed))
        compiled = run_nvrtc(source.text, arch, source.name)
        used = read_resources(compiled.cubin)
        assert max(used.local_bytes, compiled.spill_bytes) == 0
        # Groups of warps trade registers, which ptxas leaves alone where it does not know them.
        assert "setmaxnreg ignored" not in compiled.log
        shape = cuda_launch(spec, tile, arch)
        assert used.registers * shape.threads * shape.ctas_per_sm <= REGISTERS_PER_SM
        assert shape.registers in (0, used.registers)
        registers.append(used.registers)
    without, with_maxima = (-(-count // 8) for count in registers)  # given out eight at a time
    assert with_maxima <= without
