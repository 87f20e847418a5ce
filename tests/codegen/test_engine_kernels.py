"""Kernels that layers of vLLM ask for on a GPU are compiled; without an engine, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom as wl
from warploom.codegen.build import Job
from warploom.codegen.compilers.arch import Arch, arch_named
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.engines.vllm.kinds import Kind
from warploom.engines.vllm.layers import Layer

MIXED, DECODES, SHARED = range(3)
LAYERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"soft_cap": 50.0},
    "GptOss": {"head_dim": 64, "window": 128, "has_sinks": True},
    "fp8": {"cache_dtype": "fp8_e4m3"},
}


def jobs(name: str, arch: str) -> list[list[Job]]:
    """Of each of the kind's wrappers, as `warm_up` has them built."""
    shape: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "sm_scale": 0.1}
    layer = Layer("model.layers.0.self_attn.attn", **{**shape, **LAYERS[name]})
    bounds = wl.Bounds(64, 64, 4096, 64 * 256 + 1)
    kind = Kind(layer, layer.variant, page_size=16, dtype=torch.bfloat16,
                device=torch.device("cpu"), decode=bounds)  # fmt: skip
    return [list(one.jobs(arch_named(arch), [])) for one in kind.declarations]


@pytest.mark.parametrize("name", LAYERS)
def test_full_graphs_hold_one_kernel_and_the_planner_before_it(name: str) -> None:
    """A tile of their own would be a choice; and layers with windows have no prefixes."""
    found = jobs(name, "sm_90a")
    attention, planner = (source.name for source, _ in found[DECODES])
    assert "_paged16_" in attention
    assert planner.startswith("planner_")
    assert len(found) == (2 if name == "GptOss" else 3)
    assert all("_composed16_" in source.name for one in found[SHARED:] for source, _ in one)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize(
    ("name", "of", "arch"),
    [("GptOss", DECODES, "sm_90a"), ("fp8", SHARED, "sm_90a"), ("Gemma2", DECODES, "sm_80")],
)
def test_they_compile(name: str, of: int, arch: str) -> None:
    """Attention without spills."""
    for source, target in jobs(name, arch)[of]:
        assert isinstance(target, Arch)
        compiled = run_nvrtc(source.text, target, source.name)
        is_planner = source.name.startswith("planner_")
        entry = "warploom_planner" if is_planner else "warploom_kernel"
        used = read_resources(compiled.cubin, entry)
        assert is_planner or max(used.local_bytes, compiled.spill_bytes) == 0
