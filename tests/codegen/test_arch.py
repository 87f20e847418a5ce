"""The architecture table."""

from __future__ import annotations

import pytest

import warploom as wl
from warploom.codegen.attention.templates import CUDA, template_of
from warploom.codegen.choice.cost import MACHINES
from warploom.codegen.choice.tile_choice import tiles_weighed
from warploom.codegen.compilers.arch import (
    ARCHS,
    THREADS_PER_CTA,
    Arch,
    arch_for_capability,
    arch_named,
)
from warploom.codegen.compilers.options import CudaOptions
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.errors import UnknownArchitecture


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_87"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
)
def test_a_device_gets_an_architecture_it_can_run(capability: tuple[int, int], name: str) -> None:
    assert arch_for_capability(*capability).name == name


@pytest.mark.parametrize("capability", [(7, 5), (8, 8), (9, 1), (11, 0), (13, 0)])
def test_a_device_that_would_refuse_the_cubin_is_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(UnknownArchitecture, match="known are sm_80, sm_86, sm_87, sm_89"):
        arch_for_capability(*capability)


def test_names_lead_to_the_table() -> None:
    assert all(arch_named(name) is arch for name, arch in ARCHS.items())
    with pytest.raises(UnknownArchitecture, match="sm_90'"):
        arch_named("sm_90")


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_one_cta_never_gets_more_than_the_sm_has(arch: Arch) -> None:
    assert arch.shared_per_cta + 1024 == arch.shared_per_sm  # the system keeps 1 KiB per CTA


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_an_sm_holds_each_cta_that_is_not_refused(arch: Arch) -> None:
    """`LaunchShape.ctas_per_sm` is 1 or more where a CTA's own threads and memory fit."""
    assert arch.threads_per_sm >= THREADS_PER_CTA


@pytest.mark.parametrize("dim", [32, 64, 128, 192, 256])
def test_what_sweeps_recorded_is_there_for_the_model_and_for_each_tile_it_weighs(dim: int) -> None:
    recorded = {name for template in CUDA for name in template.recorded}
    assert recorded == MACHINES.keys() <= ARCHS.keys()
    spec = AttentionSpec(trace(wl.Causal()), dim, dim, dtype("bfloat16"), wl.Paged(16))
    for name in recorded:
        tiles = tiles_weighed(spec, ARCHS[name])
        assert len(tiles) >= 3
        assert all(template_of(tile).rates(spec, tile, ARCHS[name]).flops > 0 for tile in tiles)


def test_every_option_changes_the_flags() -> None:
    arch = ARCHS["sm_89"]
    plain = CudaOptions().flags(arch)
    assert "--gpu-architecture=sm_89" in plain and "--std=c++17" in plain
    changed = [
        CudaOptions(std="c++20").flags(arch),
        CudaOptions(line_info=True).flags(arch),
        CudaOptions(racecheck=True).flags(arch),
        CudaOptions(max_registers=64).flags(arch),
        CudaOptions().flags(ARCHS["sm_80"]),
    ]
    assert len({plain, *changed}) == 6


def test_fast_math_stays_off() -> None:
    assert not any("fast" in flag for flag in CudaOptions().flags(ARCHS["sm_90a"]))
