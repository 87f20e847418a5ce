"""Resources read from cubins, against ptxas' own report and cuobjdump."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from warploom.codegen.compilers.arch import ARCHS, Arch
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.headers import CudaToolchain
from warploom.codegen.compilers.nvrtc import Compiled, run_nvrtc
from warploom.codegen.compilers.options import CudaOptions

# An array that is indexed at run time lives in local memory; 96 floats lie in shared memory.
TEXT = """
extern "C" __global__ void __launch_bounds__(128) warploom_kernel(float* x, int i) {
  __shared__ float shared[96];
  float local[64];
  for (int k = 0; k < 64; ++k) local[k * i % 64] = x[k];
  shared[threadIdx.x % 96] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = shared[95 - threadIdx.x % 96] + local[i];
}
extern "C" __global__ void other(float* x) { x[0] = 1.0f; }
"""
REPORT = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers", re.S
)

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("cache")]


def compiled(arch: Arch) -> Compiled:
    return run_nvrtc(TEXT, arch, "resources")


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_the_cubin_tells_what_ptxas_reports(arch: Arch, toolchain: CudaToolchain) -> None:
    done = compiled(arch)
    reported = {name: (int(r), int(s)) for name, s, r in REPORT.findall(done.log)}
    assert set(reported) == {"warploom_kernel", "other"}
    for entry, (registers, stack) in reported.items():
        found = read_resources(done.cubin, entry)
        assert (found.registers, found.local_bytes) == (registers, stack)
    found = read_resources(done.cubin)
    system = 1024 if arch.capability >= (9, 0) else 0
    assert found.local_bytes == 256
    assert found.shared_bytes == 96 * 4 + system
    assert found.max_threads == 128
    assert read_resources(done.cubin, "other").max_threads == 0


def test_cuobjdump_agrees(toolchain: CudaToolchain, tmp_path: Path) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    tool = pathfinder.find_nvidia_binary_utility("cuobjdump")
    if tool is None:
        pytest.skip("cuobjdump is not installed (package nvidia-cuda-cuobjdump)")
    done = compiled(ARCHS["sm_90a"])
    (tmp_path / "kernel.cubin").write_bytes(done.cubin)
    command = [tool, "-res-usage", str(tmp_path / "kernel.cubin")]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    match = re.search(r"warploom_kernel:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    assert match is not None, usage
    registers, stack, shared = map(int, match.groups())
    found = read_resources(done.cubin)
    assert (found.registers, found.local_bytes, found.shared_bytes) == (registers, stack, shared)


def test_forced_spills_are_seen(toolchain: CudaToolchain) -> None:
    body = " ".join(f"float a{i} = x[{i}] * x[{i + 1}];" for i in range(64))
    total = " + ".join(f"a{i} * a{63 - i}" for i in range(64))
    text = f'extern "C" __global__ void warploom_kernel(float* x) {{ {body} x[0] = {total}; }}'
    free = run_nvrtc(text, ARCHS["sm_80"], "spills")
    tight = run_nvrtc(text, ARCHS["sm_80"], "spills", options=CudaOptions(max_registers=24))
    assert free.spill_bytes == 0 and read_resources(free.cubin).local_bytes == 0
    assert tight.spill_bytes > 0 and read_resources(tight.cubin).local_bytes > 0
    assert read_resources(tight.cubin).registers <= 24


@pytest.mark.parametrize("wrong", [b"", b"\x7fELF", b"MZ" * 100, b"\x7fELF\x02\x01" + b"\0" * 90])
def test_what_is_no_cubin_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match="cubin"):
        read_resources(wrong)


def test_a_truncated_cubin_never_gives_other_figures(toolchain: CudaToolchain) -> None:
    cubin = compiled(ARCHS["sm_80"]).cubin
    whole = read_resources(cubin)
    refused = 0
    for length in range(0, len(cubin), 61):
        try:
            assert read_resources(cubin[:length]) == whole  # only what is not read was cut off
        except ValueError:
            refused += 1
    assert refused > 0.9 * len(cubin) / 61


def test_an_absent_kernel_is_named(toolchain: CudaToolchain) -> None:
    with pytest.raises(ValueError, match="no kernel 'missing'"):
        read_resources(compiled(ARCHS["sm_80"]).cubin, "missing")
