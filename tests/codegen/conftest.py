"""What the tests of code generation share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import warploom as wl
from warploom.codegen import build as build_module
from warploom.codegen.build import build
from warploom.codegen.cache.store import Store
from warploom.codegen.compilers.headers import CudaToolchain, find_toolchain
from warploom.codegen.compilers.hostcc import HostTarget, host_target
from warploom.codegen.source import KernelSource
from warploom.errors import NoCudaCompiler, NoHostCompiler

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


@pytest.fixture(scope="module")
def host() -> HostTarget:
    """The host compiler; without one the test is skipped."""
    try:
        return host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def filled(host: HostTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of two kernels, to be copied."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARPLOOM_CACHE_DIR", str(folder))
        for number in ("1", "2"):
            build(KernelSource(f"answer {number}", CPP_TEXT % number, "cpp"), host)
    return folder


@pytest.fixture
def made(filled: Path, cache: Path, tmp_path: Path) -> Path:
    """An archive of two kernels, which are in the cache."""
    shutil.copytree(filled, cache)
    wl.export_kernels(tmp_path / "kernels.zip")
    return tmp_path / "kernels.zip"


@pytest.fixture
def elsewhere(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty cache, which all that follows uses."""
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "elsewhere"))
    build_module._artifacts.clear()
    return Store(tmp_path / "elsewhere")
