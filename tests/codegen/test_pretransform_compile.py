"""Kernels that pretransform keys compile everywhere, without spills, and repeat nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.disassembly import disassembled
from support.pretransformed_variants import OfHeads

import warploom as wl
from warploom.codegen.abi import param_fields
from warploom.codegen.compilers.arch import ARCHS, arch_named
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.lowering.specialize import for_pretransformed_keys
from warploom.codegen.pretransform import PretransformSpec
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.scheduler.model.layout import c_structs


def attention(variant: wl.Variant, dim: int = 128) -> AttentionSpec:
    return AttentionSpec(trace(variant), dim, dim, dtype("bfloat16"), wl.Ragged())


def compiled(variant: wl.Variant, dim: int = 128, heads: int = 16, arch: str = "sm_90a") -> Any:
    source = PretransformSpec.of(attention(variant, dim), heads).render("cuda", c_structs())
    made = run_nvrtc(source.text, arch_named(arch), source.name)
    assert max(read_resources(made.cubin).local_bytes, made.spill_bytes) == 0
    return made


@pytest.mark.some(10)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "variant",
    [wl.Rope(), wl.Rope(interleaved=True), wl.QKNorm() & wl.Rope(), OfHeads()],
    ids=["rope", "pairs", "norm", "heads"],
)
def test_every_architecture(arch: str, variant: wl.Variant) -> None:
    compiled(variant, arch=arch)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("dim", [8, 64, 72, 96, 256])
def test_every_head_dim(dim: int) -> None:
    compiled(wl.Rope() & wl.QKNorm(), dim)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_heads_of_a_token_share_sines(heads: int, tmp_path: Path) -> None:
    """One sine and cosine for each element of a lane, however many heads; vectors go whole."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled(wl.Rope(), heads=heads).cubin)
    code = disassembled(cubin)
    assert code.count("MUFU.SIN") == code.count("MUFU.COS") == 8
    assert code.count("STG.E.128") == heads and code.count("LDG.E.128") >= 2 * heads


@pytest.mark.parametrize(("heads", "together"), [(1, 1), (2, 2), (3, 1), (6, 2), (8, 4), (16, 4)])
def test_heads_that_are_worked_on_together_divide_all(heads: int, together: int) -> None:
    assert PretransformSpec.of(attention(wl.Rope()), heads).heads == together


def test_each_kernel_has_its_own_hooks() -> None:
    spec = attention(wl.QKNorm() & wl.Rope() & wl.SoftCap(3.0))
    before = PretransformSpec.of(spec, 8)
    assert set(before.variant.hooks) == {"key_transform"}
    names = {field.name for field in before.fields}
    assert "x_k_weight" in names and "x_q_weight" not in names and "x_cap" not in names
    after = for_pretransformed_keys(spec)
    assert set(after.variant.hooks) == {"query_transform", "logits_transform"}
    assert param_fields(after) == param_fields(spec)  # one block serves both ways
    assert after.variant.name != spec.variant.name
