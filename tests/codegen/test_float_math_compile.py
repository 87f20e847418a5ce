"""Functions of two floats in CUDA: kernels that use them compile everywhere, without spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom as wl
from warploom.codegen.attention.templates import render_cuda
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.scheduler.model.layout import c_structs


def mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    far = score % 3.0 + (i - j) * 0.1 // 0.3
    return torch.maximum(far, torch.minimum(score, torch.fmod(far, 0.7))).clamp(-5.0, 5.0)


@pytest.mark.some(2)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_kernels_compile_without_spills(arch: str) -> None:
    spec = AttentionSpec(trace(wl.flex(mod)), 64, 64, dtype("bfloat16"), wl.Ragged())
    tile = choose_tile(spec, arch_named(arch), 16).tile
    source = render_cuda(spec, tile, c_structs())
    made = run_nvrtc(source.text, arch_named(arch), source.name)
    assert max(read_resources(made.cubin).local_bytes, made.spill_bytes) == 0
