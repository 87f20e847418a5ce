"""The CUDA text of kernels of the portable template, run by fibers on the host."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import warploom.templates
from warploom.codegen.hostcc import host_target
from warploom.codegen.prepare import THREADS
from warploom.codegen.render import render_cuda
from warploom.codegen.source import TileConfig
from warploom.codegen.tiles import portable_threads
from warploom.runtime.kernels import Kernel
from warploom.scheduler.layout import c_structs

EMULATION = Path(__file__).resolve().parent / "emulation"
TEMPLATES = Path(warploom.templates.__file__).parent
CTAS = 5

_HARNESS = """
namespace warploom { alignas(1024) char shared_memory[1 << 18]; }
extern "C" __attribute__((visibility("default"))) void emulate(
    const warploom::Params* p, unsigned blocks, unsigned threads, int descending) {
  fibers::run(blocks, threads, descending != 0, [p] { warploom_kernel(*p); });
}
"""


def compile_for_fibers(text: str, source: Path) -> ctypes.CDLL:
    """CUDA text as a library of the host; the text is kept in `source`."""
    source.write_text('#include "cuda_intrinsics.hpp"\n' + text)
    library = source.with_suffix(".so")
    folders = [EMULATION, *(TEMPLATES / x for x in ("include", "cpu", "common"))]
    command = [*host_target().command, "-std=c++17", "-O1", "-fPIC", "-shared", "-w"]
    command += [f"-I{folder}" for folder in folders]
    done = subprocess.run(
        [*command, str(source), "-o", str(library)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


class Emulator:
    """Builds the CUDA text of kernels for the host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[str, Any] = {}
        self.descending = 0

    def get(self, kernels: Any, tile: TileConfig) -> Kernel:
        """Stands in for `Kernels.get`."""
        spec = kernels.spec_of(tile)
        source = render_cuda(spec, tile, c_structs(spec.kv_format.composed))
        return Kernel(
            tile, source, None, CTAS,  # type: ignore[arg-type]
            self._bind(source.text, portable_threads(tile)),
            self._bind(kernels.prepare_source.text, THREADS) if tile.prepared_keys else None,
        )  # fmt: skip

    def _bind(self, text: str, threads: int) -> Any:
        run = self._built.get(text) or self._build(text)
        self._built[text] = run
        return lambda params: lambda _: run(params.address, CTAS, threads, self.descending)

    def _build(self, text: str) -> Any:
        library = compile_for_fibers(
            text + _HARNESS, self._folder / f"kernel{len(self._built)}.cpp"
        )
        run = library["emulate"]
        run.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_int)
        return run
