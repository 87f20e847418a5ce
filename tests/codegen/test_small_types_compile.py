"""Captured tensors of small types in CUDA: rendered text and kernels without spills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import warploom as wl
from warploom.codegen.attention.templates import render_cuda
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.lowering.functors import variant_struct
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.scheduler.model.layout import c_structs

u, c, s = np.zeros(64, np.uint8), np.zeros(64, np.int8), np.zeros(64, np.int16)


def mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + (u[i] - u[j]) + (c[i] * c[j]) + (s[i] + s[j]) + (u[j] >> 3)


def test_only_what_may_not_fit_is_wrapped() -> None:
    text = variant_struct(trace(wl.flex(mod)), "cuda")
    assert text.count("wrap_") == text.count("wrap_int16(") + 2
    assert "wrap_uint8(" in text and "wrap_int8(" in text
    shifted = variant_struct(trace(wl.flex(lambda x, b, h, i, j: x + (u[j] >> 3))), "cuda")
    assert "wrap_" not in shifted


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_compile_without_spills(arch: str) -> None:
    spec = AttentionSpec(trace(wl.flex(mod)), 64, 64, dtype("bfloat16"), wl.Ragged())
    tile = choose_tile(spec, arch_named(arch), 16).tile
    source = render_cuda(spec, tile, c_structs())
    made = run_nvrtc(source.text, arch_named(arch), source.name)
    assert max(read_resources(made.cubin).local_bytes, made.spill_bytes) == 0
