"""What the tests of code generation share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warploom.codegen.headers import CudaToolchain, find_toolchain
from warploom.codegen.source import KernelSource
from warploom.errors import NoCudaCompiler

CUDA_TEXT = """
extern "C" __global__ void warploom_kernel(float* x) { x[threadIdx.x] *= %s; }
"""
CPP_TEXT = """
extern "C" __attribute__((visibility("default"))) int warploom_kernel() { return %s; }
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder that only this test sees."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(folder))
    monkeypatch.delenv("WARPLOOM_FORBID_COMPILE", raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # pytest keeps tmp_path, and images are large


@pytest.fixture
def toolchain() -> CudaToolchain:
    """The CUDA compiler; without one the test is skipped."""
    try:
        return find_toolchain()
    except NoCudaCompiler as error:
        pytest.skip(str(error))


@pytest.fixture
def cuda_source() -> Callable[..., KernelSource]:
    """Makes a kernel that compiles in no time; another factor is another kernel."""

    def make(factor: str = "2.0f", name: str = "scale") -> KernelSource:
        return KernelSource(name, CUDA_TEXT % factor, "cuda")

    return make


@pytest.fixture
def cpp_source() -> Callable[..., KernelSource]:
    """The same for the host compiler."""

    def make(value: str = "1", name: str = "answer") -> KernelSource:
        return KernelSource(name, CPP_TEXT % value, "cpp")

    return make
