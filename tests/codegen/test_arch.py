"""The architecture table."""

from __future__ import annotations

import pytest

from warploom.codegen.compilers.arch import ARCHS, Arch, arch_for_capability, arch_named
from warploom.codegen.compilers.options import CudaOptions
from warploom.errors import UnknownArchitecture


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_87"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
)
def test_a_device_gets_an_architecture_it_can_run(capability: tuple[int, int], name: str) -> None:
    assert arch_for_capability(*capability).name == name


@pytest.mark.parametrize("capability", [(7, 5), (8, 8), (9, 1), (10, 3), (13, 0)])
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
