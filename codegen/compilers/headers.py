"""Where the CUDA compiler and the headers it reads are, and which versions they have."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import warploom.templates
from warploom import env
from warploom.errors import NoCudaCompiler

_DEFINE = r"^#\s*define\s+{name}\s+(\d+)"
_TEMPLATES = Path(warploom.templates.__file__).parent


@dataclass(frozen=True)
class CudaToolchain:
    """The CUDA compiler of this installation.

    Attributes:
        nvrtc: shared libraries to load, NVRTC last (it does not find its builtins by itself).
        nvrtc_version: (major, minor).
        include_dirs: folders to search, ours first.
        versions: what the cubin depends on besides our own headers, by name.
    """

    nvrtc: tuple[Path, Path]
    nvrtc_version: tuple[int, int]
    include_dirs: tuple[Path, ...]
    versions: tuple[tuple[str, str], ...]

    def include_flags(self) -> tuple[str, ...]:
        return tuple(f"--include-path={folder}" for folder in self.include_dirs)

    def key_parts(self) -> dict[str, str]:
        """What of the tools a cache key must hold."""
        return {"headers": header_digest("include", "common"), **dict(self.versions)}


@lru_cache(maxsize=1)
def find_toolchain() -> CudaToolchain:
    """Finds NVRTC, CUTLASS, CCCL and the CUDA runtime headers; loads none of them.

    Wheels come first, then what cuda-pathfinder finds, then a toolkit named by CUDA_HOME,
    CUDA_PATH or CONDA_PREFIX, then `/usr/local/cuda`. CCCL of a toolkit that fits the headers needs
    no pathfinder.

    Raises:
        NoCudaCompiler: a part is missing; says which one and what to install.
    """
    cuda = _find_cuda_headers()
    version = _defined(cuda / "cuda_runtime_api.h", "CUDART_VERSION")
    major = version // 1000
    cccl = _find_cccl(cuda, major)
    cutlass = _find_cutlass(major)
    nvrtc = _find_nvrtc(cuda, major)
    minor = int(nvrtc[0].suffix[1:])
    cutlass_version = ".".join(
        str(_defined(cutlass / "cutlass" / "version.h", f"CUTLASS_{part}"))
        for part in ("MAJOR", "MINOR", "PATCH")
    )
    return CudaToolchain(
        nvrtc=nvrtc,
        nvrtc_version=(major, minor),
        include_dirs=(
            *(_TEMPLATES / "include", _TEMPLATES / "common"),
            *(cutlass, cccl, cuda, *_above_cccl(cccl, cuda)),
        ),
        versions=(
            # The size tells patch releases apart without loading the library.
            ("nvrtc", f"{major}.{minor}, {nvrtc[1].stat().st_size} bytes"),
            ("cutlass", cutlass_version),
            ("cccl", str(_defined(cccl / "cuda/std/__cccl/version.h", "CCCL_VERSION"))),
            ("cuda_headers", str(version)),
        ),
    )


@lru_cache
def header_digest(*folders: str) -> str:
    """SHA-256 of the headers in these folders of `templates/`: their paths and their text."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((_TEMPLATES / folder).rglob("*")):
            if path.suffix in (".cuh", ".hpp", ".h"):
                name, text = path.relative_to(_TEMPLATES).as_posix().encode(), path.read_bytes()
                digest.update(b"%d:%s%d:%s" % (len(name), name, len(text), text))
    return digest.hexdigest()


def _find_cuda_headers() -> Path:
    wheels = (*_wheel_folders("cu13/include"), *_wheel_folders("cuda_runtime/include"))
    for folder in _first(wheels, _by_pathfinder("cudart"), _toolkit_folders("include")):
        if (folder / "cuda_runtime_api.h").is_file():
            return folder
    raise NoCudaCompiler(what="the CUDA runtime's headers", extra="cu13")


def _find_cccl(cuda: Path, major: int) -> Path:
    # In a toolkit, CCCL lies beside the runtime headers (CUDA 12) or in their folder `cccl` (13).
    wheels = _wheel_folders("cuda_cccl/include")
    places = ((cuda / "cccl",), wheels, (cuda,), _cccl_of_toolkits(major), _by_pathfinder("cccl"))
    for folder in _first(*places):
        if (folder / "cuda/std/__cccl/version.h").is_file():
            return folder
    raise NoCudaCompiler(what="CCCL (headers cuda/std)", extra=f"cu{major}")


def _cccl_of_toolkits(major: int) -> Iterator[Path]:
    """Those of the headers' own major version. Asked before pathfinder, which takes longer."""
    for folder in _toolkit_folders("include"):
        runtime = folder / "cuda_runtime_api.h"
        if runtime.is_file() and _defined(runtime, "CUDART_VERSION") // 1000 == major:
            yield from (folder / "cccl", folder)


def _above_cccl(cccl: Path, cuda: Path) -> list[Path]:
    """From CUDA 13 on, CUTLASS includes <cccl/cuda/std/...>; CCCL may come from another place."""
    return [cccl.parent] if cccl.name == "cccl" and cccl.parent != cuda else []


def _find_cutlass(major: int) -> Path:
    # find_spec, not import: the module's own code is large and of no use here.
    spec = find_spec("cutlass_library")
    candidates = [Path(place) / "source/include" for place in _places(spec)]
    for folder in _first(candidates, _by_pathfinder("cutlass")):
        if (folder / "cute/tensor.hpp").is_file():
            return folder
    raise NoCudaCompiler(what="CUTLASS (package nvidia-cutlass)", extra=f"cu{major}")


def _find_nvrtc(cuda: Path, major: int) -> tuple[Path, Path]:
    """NVRTC's builtins (whose name ends in the minor version) and NVRTC, for these headers."""
    beside = (cuda.parent / "lib", cuda.parent / "lib64")
    wheels = (*_wheel_folders(f"cu{major}/lib"), *_wheel_folders("cuda_nvrtc/lib"))
    toolkits = (*_toolkit_folders("lib64"), *_toolkit_folders("lib"))
    for folder in (*beside, *wheels, *toolkits):
        library = folder / f"libnvrtc.so.{major}"
        for builtins in folder.glob(f"libnvrtc-builtins.so.{major}.*"):
            if library.is_file() and builtins.suffix[1:].isdigit():
                return builtins, library
    raise NoCudaCompiler(what=f"NVRTC {major} (for the headers in {cuda})", extra=f"cu{major}")


def _first(*sources: Iterable[Path]) -> Iterator[Path]:
    return chain.from_iterable(sources)  # lazy: a later source is asked only when it is needed


def _wheel_folders(part: str) -> list[Path]:
    """A folder of NVIDIA's wheels. They are looked at first: importing pathfinder takes 20 ms."""
    return [Path(place) / part for place in _places(find_spec("nvidia"))]


def _by_pathfinder(name: str) -> Iterator[Path]:
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        found = find_nvidia_header_directory(name)
    except (ImportError, RuntimeError, ValueError):  # not installed, or too old to know the name
        return
    if found:
        yield Path(found)


def _toolkit_folders(kind: str) -> Iterator[Path]:
    for root in env.cuda_roots():
        yield root / kind
        yield from sorted(root.glob(f"targets/*-linux/{kind}"))


def _places(spec: object) -> list[str]:
    return list(getattr(spec, "submodule_search_locations", None) or [])


def _defined(header: Path, name: str) -> int:
    match = re.search(
        _DEFINE.format(name=name), header.read_text(encoding="utf-8", errors="replace"), re.M
    )
    if match is None:
        raise NoCudaCompiler(what=f"{name} in {header}", extra="cu13")
    return int(match[1])
