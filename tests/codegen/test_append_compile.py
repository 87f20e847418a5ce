"""The append kernel compiles for every architecture, without spills, and holds no other hook."""

from __future__ import annotations

from typing import Any

import pytest

import warploom as wl
from warploom.codegen.append import AppendSpec, key_value_hooks
from warploom.codegen.compilers.arch import ARCHS, arch_named
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.dsl.types.dtypes import dtype, kv_dtype
from warploom.dsl.variants.trace import trace


def spec(
    variant: wl.Variant, dim: int = 128, cache: str = "bfloat16", page: int = 16
) -> AppendSpec:
    kept = key_value_hooks(trace(variant))
    return AppendSpec(kept, dim, dim, dtype("bfloat16"), kv_dtype(cache), page)


@pytest.mark.some(6)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("variant", [wl.Rope(), wl.QKNorm() & wl.Rope()], ids=["rope", "norm"])
def test_every_architecture(arch: str, variant: wl.Variant) -> None:
    source = spec(variant).render("cuda")
    compiled = run_nvrtc(source.text, arch_named(arch), source.name)
    resources = read_resources(compiled.cubin)
    assert max(resources.local_bytes, compiled.spill_bytes) == 0


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("dim", [8, 72, 96, 256])
def test_every_head_dim(dim: int) -> None:
    source = spec(wl.Rope(), dim, "float16", 1).render("cuda")
    compiled = run_nvrtc(source.text, arch_named("sm_90a"), source.name)
    assert compiled.spill_bytes == 0


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("cache", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_caches_of_8_bits(arch: str, cache: str) -> None:
    source = spec(wl.Rope(), cache=cache).render("cuda")
    assert run_nvrtc(source.text, arch_named(arch), source.name).spill_bytes == 0


def test_only_the_hooks_of_keys_and_values_are_kept() -> None:
    class Everything(wl.Rope):
        gain = wl.Scalar("float32")

        def logits_transform(self, logits: Any, at: Any) -> Any:
            return logits * self.gain

    one, other = (spec(v & wl.Causal() & wl.SoftCap(3.0)) for v in (wl.Rope(), Everything()))
    assert set(one.variant.hooks) == {"key_transform"}
    names = [field.name for field in other.fields]
    assert "x_rope_theta" in names and "x_gain" not in names and "x_cap" not in names
