"""Kernels that may begin before the one ahead of them ends read nothing until it has ended.

Loads that the compiler takes for loads of constants, as those of a plan, it could move anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.disassembly import disassembled

import warploom as wl
from warploom.codegen.append import AppendSpec, key_value_hooks
from warploom.codegen.attention.templates import cuda_launch, render_cuda
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.planner_source import PlannerSpec
from warploom.codegen.pretransform import PretransformSpec
from warploom.codegen.source import KernelSource, TileConfig
from warploom.dsl.types.dtypes import bfloat16
from warploom.dsl.types.dtypes import kv_dtype as stored
from warploom.dsl.types.formats import KVFormat, Paged, Ragged
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.scheduler.model.layout import c_planning, c_structs

# Instructions that reach global memory; those of shared memory and of parameters are others.
GLOBAL = re.compile(r"\b(LDG|LD|STG|ST|ATOMG?|RED|LDGSTS|UTMALDG|UTMAPF|UBLKCP)(\.|\s)")
HOPPER = TileConfig(128, 128, 8, 2, "hopper", 2)


def attention(
    kv_format: KVFormat,
    rows: int,
    tile: TileConfig | None = None,
    variant: Variant | None = None,
) -> KernelSource:
    spec = AttentionSpec(
        trace(wl.Causal() if variant is None else variant), 128, 128, bfloat16, kv_format
    )
    return render_cuda(spec, tile or choose_tile(spec, ARCHS["sm_90a"], rows).tile, c_structs())


def append() -> KernelSource:
    kept = key_value_hooks(trace(wl.Rope()))
    spec = AppendSpec(kept, 128, 128, bfloat16, stored("bfloat16"), 16)
    return spec.render("cuda")


def pretransform() -> KernelSource:
    spec = AttentionSpec(trace(wl.Rope() & wl.QKNorm()), 128, 128, bfloat16, Ragged())
    return PretransformSpec.of(spec, 8).render("cuda", c_structs())


SOURCES: dict[str, Callable[[], KernelSource]] = {
    "one row": lambda: attention(Paged(16), 1),
    "16 rows": lambda: attention(Paged(16), 4),
    "64 rows": lambda: attention(Ragged(), 64, TileConfig(64, 64, 4, 2)),
    "hopper": lambda: attention(Ragged(), 1000, HOPPER),
    "hopper, gathers, transforms, reads": lambda: attention(
        Paged(1), 1000, HOPPER, wl.Rope() & wl.DocumentMask()
    ),
    "append": append,
    "pretransform": pretransform,
    "planner": lambda: PlannerSpec(trace(wl.Causal())).render("cuda", c_planning()),
}


def instructions(source: KernelSource, arch: str, folder: Path) -> list[str]:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(run_nvrtc(source.text, ARCHS[arch], source.name).cubin)
    return [
        line for line in disassembled(cubin).splitlines() if re.search(r"/\*[0-9a-f]{4,}", line)
    ]


@pytest.mark.some(4)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("name", SOURCES)
def test_nothing_is_read_or_written_before_the_wait(name: str, tmp_path: Path) -> None:
    code = instructions(SOURCES[name](), "sm_90a", tmp_path)
    waits = [i for i, line in enumerate(code) if "ACQBULK" in line]
    assert waits and any("PREEXIT" in line for line in code[waits[0] :])
    assert [line for line in code[: waits[0]] if GLOBAL.search(line)] == []
    assert any(GLOBAL.search(line) for line in code[waits[0] :])  # the pattern finds them


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
def test_older_architectures_wait_for_nothing(tmp_path: Path) -> None:
    code = instructions(append(), "sm_80", tmp_path)
    assert not any("ACQBULK" in line for line in code)


@pytest.mark.parametrize(
    ("rows", "arch", "overlaps"),
    [(1, "sm_90a", False), (16, "sm_90a", True), (16, "sm_120", True), (16, "sm_80", False)],
)
def test_tiles_of_one_row_do_not_overlap(rows: int, arch: str, overlaps: bool) -> None:
    spec = AttentionSpec(trace(wl.Causal()), 128, 128, bfloat16, Paged(16))
    tile = TileConfig(rows, 64, 4, 2)
    assert cuda_launch(spec, tile, ARCHS[arch]).overlaps is overlaps
