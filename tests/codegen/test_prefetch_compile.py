"""The prefetch kernel compiles for every architecture, and asks in the way that each has."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.disassembly import disassembled

from warploom.codegen.compilers.arch import ARCHS, arch_named
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.prefetch import SPAN, PrefetchSpec


@pytest.mark.some(4)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize(
    ("arch", "keep"), [*((arch, False) for arch in ARCHS), ("sm_80", True), ("sm_90a", True)]
)
def test_every_architecture(arch: str, keep: bool, tmp_path: Path) -> None:
    source = PrefetchSpec(keep).render("cuda")
    compiled = run_nvrtc(source.text, arch_named(arch), source.name)
    resources = read_resources(compiled.cubin)
    assert max(resources.local_bytes, compiled.spill_bytes) == 0
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.cubin)
    text = disassembled(cubin)
    is_bulk = arch_named(arch).capability >= (9, 0)
    assert ("UBLKPF" in text, "CCTL" in text) == (is_bulk, not is_bulk)


def test_the_record_has_no_holes() -> None:
    assert SPAN.itemsize == 16 and SPAN.fields is not None and SPAN.names is not None
    assert [SPAN.fields[name][1] for name in SPAN.names] == [0, 8, 12]


def test_kinds_differ_in_what_they_keep() -> None:
    one, other = (PrefetchSpec(keep).render("cuda") for keep in (False, True))
    assert one.text != other.text and {one.name, other.name} == {"prefetch", "prefetch_keep"}
