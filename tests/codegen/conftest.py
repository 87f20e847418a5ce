"""What the tests of code generation share."""

from __future__ import annotations

from pathlib import Path

import pytest

from warploom.codegen.headers import CudaToolchain, find_toolchain
from warploom.codegen.source import KernelSource
from warploom.errors import NoCudaCompiler

CUDA_TEXT = """
extern "C" __global__ void warploom_kernel(float* x) { x[threadIdx.x] *= %s; }
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder that only this test sees."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(folder))
    monkeypatch.delenv("WARPLOOM_FORBID_COMPILE", raising=False)
    return folder


@pytest.fixture
def toolchain() -> CudaToolchain:
    """The CUDA compiler; without one the test is skipped."""
    try:
        return find_toolchain()
    except NoCudaCompiler as error:
        pytest.skip(str(error))


def cuda_source(factor: str = "2.0f", name: str = "scale") -> KernelSource:
    """A kernel small enough to compile in no time."""
    return KernelSource(name, CUDA_TEXT % factor, "cuda")
