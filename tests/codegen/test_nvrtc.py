"""The CUDA compiler: a cubin for every architecture, errors with places, workers that may die."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.side_by_side import in_threads

from warploom.codegen.compilers import nvrtc, nvrtc_worker
from warploom.codegen.compilers.arch import ARCHS, Arch
from warploom.codegen.compilers.compiler_log import first_errors
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.headers import CudaToolchain
from warploom.codegen.compilers.nvrtc import compile_cuda, run_nvrtc, with_places
from warploom.codegen.compilers.nvrtc_worker import Reply, Request
from warploom.codegen.compilers.options import CudaOptions
from warploom.codegen.source import KernelSource
from warploom.errors import CompileError, NoCudaCompiler

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("cache", "toolchain")]
SM_80 = ARCHS["sm_80"]


@pytest.mark.some(4)
@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_cute_compiles_for_every_architecture(arch: Arch) -> None:
    text = """
    #include <cute/numeric/integral_constant.hpp>
    #include <cuda_bf16.h>
    extern "C" __global__ void warploom_kernel(__nv_bfloat16* x) {
      x[threadIdx.x] = __float2bfloat16(float(cute::Int<42>::value));
    }
    """
    assert read_resources(run_nvrtc(text, arch, use_pch=False).cubin).local_bytes == 0


def test_options_reach_the_compiler() -> None:
    text = 'extern "C" __global__ void warploom_kernel(int* x) { *x = __cplusplus; }'
    plain, with_lines = (
        run_nvrtc(text, SM_80, options=CudaOptions(line_info=on)) for on in (False, True)
    )
    assert b".debug_line" in with_lines.cubin and b".debug_line" not in plain.cubin
    assert "Used" in plain.log and plain.spill_bytes == 0
    only_17 = text.replace("*x", "static_assert(__cplusplus == 201703L); *x")
    assert compile_cuda(only_17, SM_80)
    with pytest.raises(CompileError):
        run_nvrtc(only_17, SM_80, options=CudaOptions(std="c++20"))


def test_a_compile_error_tells_name_place_and_reason(tmp_path: Path) -> None:
    text = '\n\nextern "C" __global__ void warploom_kernel(float* x) { *x = oops; }\n'
    with pytest.raises(CompileError) as caught:
        run_nvrtc(text, SM_80, "portable_Oops", kept=tmp_path / "kernel.cu")
    message = str(caught.value)
    assert "NVRTC" in message and "portable_Oops" in message
    assert f"{tmp_path / 'kernel.cu'}:3: error" in message
    assert '"oops" is undefined' in message


def test_only_the_first_errors_are_shown() -> None:
    noise = ["k.cu(1): warning #1: x", ""]
    errors = [f"k.cu({i}): error: number {i}" for i in range(40)]
    shown = first_errors(
        with_places("\n".join([*noise, *errors]), "k.cu", "/kept/kernel.cu")
    ).splitlines()
    assert shown[0] == "/kept/kernel.cu:0: error: number 0"
    assert len(shown) == 13 and shown[-1] == "... (28 more lines)"
    assert first_errors("strange failure") == "strange failure"


def test_the_same_source_gives_the_same_cubin(
    cuda_source: Callable[..., KernelSource],
) -> None:
    text = cuda_source().text
    assert compile_cuda(text, SM_80) == compile_cuda(text, SM_80)


def test_unicode_in_a_source_does_no_harm() -> None:
    assert compile_cuda('// Größe ≤ 10\nextern "C" __global__ void warploom_kernel() {}', SM_80)


def test_threads_compile_side_by_side() -> None:
    cubins: dict[int, bytes] = {}

    def work(i: int) -> None:
        text = f'extern "C" __global__ void warploom_kernel(int* x) {{ *x = {i}; }}'
        cubins[i] = compile_cuda(text, SM_80)

    in_threads(work, range(4))
    assert len(set(cubins.values())) == 4


def test_without_a_python_to_start_it_compiles_in_this_process(
    monkeypatch: pytest.MonkeyPatch, cuda_source: Callable[..., KernelSource]
) -> None:
    text = cuda_source().text
    usual = compile_cuda(text, SM_80)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert compile_cuda(text, SM_80) == usual


def test_a_dead_worker_is_an_error_not_a_hang(
    monkeypatch: pytest.MonkeyPatch, cuda_source: Callable[..., KernelSource]
) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(nvrtc, "_WORKER", killed)
    with pytest.raises(CompileError, match="status -9"):
        compile_cuda(cuda_source().text, SM_80)


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        nvrtc, "_in_worker", lambda request: Reply(None, "No module", missing="cuda-bindings")
    )
    with pytest.raises(NoCudaCompiler, match=r"cuda-bindings.*pip install 'warploom\[cu13\]'"):
        compile_cuda("", SM_80)


def test_a_library_that_does_not_load_is_missing() -> None:
    request = Request(("/nowhere/libnvrtc.so",), "", "x.cu", ())
    assert nvrtc_worker.compile_program(request, own_process=False).missing


def test_compiling_needs_no_driver(toolchain: CudaToolchain) -> None:
    code = """
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.headers import find_toolchain
from warploom.codegen.compilers.nvrtc_worker import Request, compile_program
tools = find_toolchain()
request = Request(tuple(map(str, tools.nvrtc)), 'extern "C" __global__ void f() {}', "f.cu",
                  ("--gpu-architecture=sm_80",))
assert compile_program(request, own_process=False).cubin
names = {line.split()[-1].rpartition("/")[2] for line in open("/proc/self/maps")}
assert not [name for name in names if name.startswith("libcuda.so")], names
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
