"""The same kernels with narrower vectors and with another compiler."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from warploom.codegen.hostcc import probe
from warploom.dsl.formats import Paged
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.rope import Rope
from warploom.dsl.library.soft_cap import SoftCap

Run = Callable[..., Any]

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 instruction sets")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("compiler", "machine"),
    [
        pytest.param("g++", "-march=x86-64-v3", marks=x86),  # AVX2, F16C
        pytest.param("g++", "-march=x86-64", marks=x86),  # SSE2 only
        ("clang++", "-march=native"),
    ],
)
def test_other_targets(cpu_run: Run, compiler: str, machine: str, dtype: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    target = probe((compiler,), machine)
    if target is None or (machine.endswith("v3") and "avx2" not in cpu_flags()):
        pytest.skip(f"{compiler} or this machine does not know {machine}")
    variant = Causal() & SoftCap(5.0) & Rope(dim=16)
    fields = {"dtype": dtype, "head_dim": 40, "head_dim_v": 72, "kv_format": Paged(3)}
    run = cpu_run(variant, (1, 70, 5), (130, 150, 0), target=target, **fields)
    run.check(run.launch())


def cpu_flags() -> str:
    with open("/proc/cpuinfo") as file:
        return file.read()
