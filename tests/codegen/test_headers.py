"""Finding the CUDA compiler and its headers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from warploom.codegen.compilers import headers
from warploom.codegen.compilers.headers import CudaToolchain, find_toolchain, header_digest
from warploom.errors import NoCudaCompiler


@pytest.fixture(autouse=True)
def forget_what_was_found() -> Iterator[None]:
    yield
    find_toolchain.cache_clear()
    header_digest.cache_clear()


def fake_toolkit(root: Path, *, version: int = 12080, minor: int = 8) -> Path:
    """A toolkit with every file that is looked at."""
    files = {
        "include/cuda_runtime_api.h": f"#define CUDART_VERSION  {version}\n",
        "include/cccl/cuda/std/__cccl/version.h": "#define CCCL_VERSION 2008000\n",
        f"lib64/libnvrtc.so.{version // 1000}": "library",
        f"lib64/libnvrtc-builtins.so.{version // 1000}.{minor}": "builtins",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def only_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No CUDA wheels; a toolkit in CUDA_HOME and CUTLASS in a package."""
    root = fake_toolkit(tmp_path / "toolkit")
    cutlass = tmp_path / "cutlass"
    for name, text in {
        "cute/tensor.hpp": "",
        "cutlass/version.h": "".join(
            f"#define CUTLASS_{part} {value}\n"
            for part, value in (("MAJOR", 4), ("MINOR", 2), ("PATCH", 1))
        ),
    }.items():
        path = cutlass / "source/include" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(headers, "_by_pathfinder", lambda name: iter(()))
    places = {"cutlass_library": [str(cutlass)], "nvidia": []}
    monkeypatch.setattr(headers, "find_spec", lambda name: name)
    monkeypatch.setattr(headers, "_places", places.__getitem__)
    monkeypatch.setattr(headers.env, "cuda_roots", lambda: [root])
    find_toolchain.cache_clear()
    return root


@pytest.mark.nvrtc
def test_the_installed_compiler_is_found(toolchain: CudaToolchain) -> None:
    assert all(library.is_file() for library in toolchain.nvrtc)
    ours, _, cutlass, cccl, cuda = toolchain.include_dirs[:5]
    assert (ours / "warploom").is_dir()
    assert (cutlass / "cute/tensor.hpp").is_file()
    assert (cccl / "cuda/std/cstdint").is_file()
    assert (cuda / "cuda_bf16.h").is_file()
    assert set(toolchain.key_parts()) == {"headers", "nvrtc", "cutlass", "cccl", "cuda_headers"}


def test_a_toolkit_serves_without_wheels(only_toolkit: Path) -> None:
    found = find_toolchain()
    assert found.nvrtc_version == (12, 8)
    assert found.nvrtc[1] == only_toolkit / "lib64/libnvrtc.so.12"
    assert dict(found.versions) == {
        "nvrtc": "12.8, 7 bytes",
        "cutlass": "4.2.1",
        "cccl": "2008000",
        "cuda_headers": "12080",
    }


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("include/cuda_runtime_api.h", "runtime's headers"),
        ("include/cccl", "CCCL"),
        ("lib64/libnvrtc.so.12", "NVRTC 12"),
        ("lib64/libnvrtc-builtins.so.12.8", "NVRTC 12"),
        ("../cutlass", "CUTLASS"),
    ],
)
def test_what_is_missing_is_named_with_a_remedy(
    only_toolkit: Path, missing: str, named: str
) -> None:
    path = only_toolkit / missing
    path.rename(path.with_name("gone"))
    with pytest.raises(NoCudaCompiler, match=named) as caught:
        find_toolchain()
    assert "pip install 'warploom[cu1" in str(caught.value)
    assert "pip install '.[cu1" in str(caught.value)  # which needs no published package


def test_cccl_apart_from_the_runtime_is_found_by_both_names(
    only_toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUTLASS writes <cccl/cuda/std/...> from CUDA 13 on, CCCL itself <cuda/std/...>."""
    apart = tmp_path / "other/include/cccl"
    apart.parent.mkdir(parents=True)
    (only_toolkit / "include/cccl").rename(apart)
    found = {"cccl": iter((apart,)), "cutlass": iter(()), "cudart": iter(())}
    monkeypatch.setattr(headers, "_by_pathfinder", found.__getitem__)
    assert {apart, apart.parent} <= set(find_toolchain().include_dirs)


def test_cccl_of_a_toolkit_that_fits_needs_no_pathfinder(
    only_toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = only_toolkit / "include"  # stands for wheels that came without CCCL
    (cuda / "cccl").rename(tmp_path / "gone")
    old = fake_toolkit(tmp_path / "old", version=11080)
    fitting = fake_toolkit(tmp_path / "fitting", version=12000)
    monkeypatch.setattr(headers.env, "cuda_roots", lambda: [only_toolkit, old, fitting])
    assert fitting / "include/cccl" in find_toolchain().include_dirs


def test_headers_and_compiler_must_be_of_one_major_version(only_toolkit: Path) -> None:
    header = only_toolkit / "include/cuda_runtime_api.h"
    header.write_text("#define CUDART_VERSION  13000\n")
    with pytest.raises(NoCudaCompiler, match="NVRTC 13"):
        find_toolchain()


def test_the_digest_sees_every_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest() -> str:
        header_digest.cache_clear()
        return header_digest("include", "common")

    monkeypatch.setattr(headers, "_TEMPLATES", tmp_path)
    nothing = digest()
    (tmp_path / "include/warploom").mkdir(parents=True)
    (tmp_path / "include/warploom/a.cuh").write_text("int a;")
    one = digest()
    (tmp_path / "include/warploom/a.cuh").write_text("int b;")
    changed = digest()
    (tmp_path / "include/warploom/a.cuh").rename(tmp_path / "include/warploom/b.cuh")
    renamed = digest()
    (tmp_path / "include/warploom/notes.md").write_text("no header")
    assert len({nothing, one, changed, renamed}) == 4
    assert digest() == renamed


def test_finding_loads_neither_compiler_nor_driver() -> None:
    code = """
import sys
from warploom.codegen.compilers.headers import find_toolchain
from warploom.errors import NoCudaCompiler
try:
    find_toolchain()
except NoCudaCompiler:
    pass
libraries = {line.split()[-1] for line in open("/proc/self/maps")}
assert not [name for name in libraries if "libnvrtc" in name or "libcuda" in name], libraries
assert "cutlass_library" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
