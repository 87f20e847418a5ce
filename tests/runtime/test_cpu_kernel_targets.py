"""The same kernels with narrower vectors and with another compiler."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from warploom.codegen.compilers.hostcc import host_target, probe
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.rope import Rope
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.types.formats import Paged

Run = Callable[..., Any]

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 instruction sets")


@pytest.mark.some(6)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("compiler", "machine"),
    [
        pytest.param("g++", "-march=cooperlake", marks=x86),  # AVX-512 BF16 without AMX
        pytest.param("g++", "-march=x86-64-v3", marks=x86),  # AVX2, F16C
        pytest.param("g++", "-march=x86-64", marks=x86),  # SSE2 only
        ("clang++", "-march=native"),
    ],
)
def test_other_targets(cpu_run: Run, compiler: str, machine: str, dtype: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    target = probe((compiler,), machine)
    needed = {"-march=cooperlake": "avx512_bf16", "-march=x86-64-v3": "avx2"}.get(machine, "")
    if target is None or needed not in cpu_flags():
        pytest.skip(f"{compiler} or this machine does not know {machine}")
    variant = Causal() & SoftCap(5.0) & Rope(dim=16)
    fields = {"dtype": dtype, "head_dim": 40, "head_dim_v": 72, "kv_format": Paged(3)}
    run = cpu_run(variant, (1, 70, 5), (130, 150, 0), target=target, **fields)
    run.check(run.launch())


REFUSED = """
import ctypes, errno, struct, sys
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # of seccomp's filters; offsets are seccomp_data's
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
ARCH_PRCTL, REQUEST_PERMISSION = 158, 0x1023
program = b"".join(
    struct.pack("HBBI", *step)
    for step in (
        (LOAD, 0, 0, 0), (EQUAL, 0, 3, ARCH_PRCTL),
        (LOAD, 0, 0, 16), (EQUAL, 0, 1, REQUEST_PERMISSION), (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    )
)
filters = ctypes.create_string_buffer(program)
head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 6, ctypes.addressof(filters)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, head):  # no new privileges; the filter
    sys.exit(77)
import torch, warploom as wl
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 40, 2, 64).bfloat16()
out = wl.attention(q, k, v, variant=wl.Causal())
exact = torch.nn.functional.scaled_dot_product_attention(
    *(x.double().transpose(1, 2) for x in (q, k, v)), is_causal=True
)
assert (out.transpose(1, 2) - exact).abs().max() < 0.02
"""


@x86
def test_sandbox_may_refuse_tile_registers() -> None:
    if "__AMX_BF16__" not in host_target().features:
        pytest.skip("no AMX")
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("no seccomp")
    assert done.returncode == 0, done.stderr


def cpu_flags() -> str:
    with open("/proc/cpuinfo") as file:
        return file.read()
