"""The CUDA text of kernels, run by fibers on the host."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import warploom.templates
from support.std_headers import plain_command, precompiled
from warploom.codegen.attention.templates import template_of
from warploom.codegen.compilers.arch import Arch, arch_named
from warploom.codegen.kinds import KernelSpec
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.source import KernelSource, TileChoice
from warploom.runtime.devices import loaded
from warploom.runtime.launching.kernels import Kernel
from warploom.scheduler.model.layout import c_structs

EMULATION = Path(__file__).resolve().parents[1] / "emulation"
BUILT = EMULATION.parents[1] / "build" / "std"
TEMPLATES = Path(warploom.templates.__file__).parent
CTAS = 5
TYPES = {"FLOAT16": 2, "BFLOAT16": 2, "UINT8": 1}

_HARNESS = """
namespace warploom {
alignas(1024) char shared_memory[1 << 18];
namespace hopper {
alignas(1024) char shared_memory[1 << 18];
}
}
extern "C" __attribute__((visibility("default"))) bool emulate(
    const void* p, unsigned blocks, unsigned threads, unsigned bytes, unsigned order) {
  static warploom::Params params;  // whose maps are aligned
  std::memcpy(&params, p, sizeof(params));
  fibers::shared.clear();
  for (char* memory : {warploom::shared_memory, warploom::hopper::shared_memory}) {
    std::memset(memory, 0xff, 1 << 18);
    fibers::shared.push_back({memory, bytes});
  }
  return fibers::run(blocks, threads, order, [] { warploom_kernel(params); });
}
"""


def compile_for_fibers(text: str, source: Path) -> ctypes.CDLL:
    """CUDA text as a library of the host; the text is kept in `source`."""
    source.write_text('#include "cuda_intrinsics.hpp"\n' + text)
    library = source.with_suffix(".so")
    flags = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-fPIC", "-shared", "-w"]
    flags.append("-U_FORTIFY_SOURCE")  # it takes jumps between the stacks of fibers for mistakes
    command = [*plain_command(BUILT), *flags]
    folders = [
        precompiled(EMULATION / "cuda_intrinsics.hpp", command, BUILT),
        EMULATION,
        *(TEMPLATES / x for x in ("include", "cpu", "common")),
    ]
    command += [f"-I{folder}" for folder in folders]
    done = subprocess.run(
        [*command, str(source), "-o", str(library)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


class Driver:
    """Of CUDA's driver, what describes tensors to the copy engine."""

    cuuint32_t = cuuint64_t = int
    CUtensorMapDataType = SimpleNamespace(  # bytes of an element stand for its type
        **{f"CU_TENSOR_MAP_DATA_TYPE_{name}": size for name, size in TYPES.items()}
    )

    def __getattr__(self, name: str) -> Any:
        return mock.Mock()  # names of options, which mean nothing here

    def cuTensorMapEncodeTiled(
        self, kind: int, rank: int, address: int, sizes: Any, strides: Any, box: Any, *rest: Any
    ) -> tuple[int, Any]:
        """A map as `tests/emulation/warploom/hopper/ptx.cuh` reads it."""
        words = (address, *sizes, *strides, *box[:2], kind)
        kept = ctypes.create_string_buffer(struct.pack(f"={len(words)}Q", *words), 128)
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(kept))


class Emulator:
    """Builds the CUDA text of kernels for the host.

    Attributes:
        order: in which CTAs and their threads run: 0 ascending, 1 descending, else a random one by
            its seed, in which CTAs take turns.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[str, Any] = {}
        self.order = 0

    def get(self, kernels: Any, choice: TileChoice) -> Kernel:
        """Stands in for `Kernels.get`."""
        arch = arch_named("sm_90a")
        spec, tile = kernels.spec_of(choice), choice.tile
        of = template_of(tile).kernel(spec, tile)
        structs = c_structs(spec.kv_format.composed, bool(tile.of_roles))
        made = self._load(of, of.render("cuda", structs), arch)
        before = None
        if choice.pretransformed_keys:
            before = self._load(kernels.pretransform, kernels.pretransform_source, arch)
        return Kernel(made.source, made.artifact, CTAS, made.bind, tile, before)

    def _load(self, of: KernelSpec, source: KernelSource, arch: Arch) -> loaded.Kernel:
        bind = self._bind(source.text, of.launch(arch))
        return loaded.Kernel(source, None, CTAS, bind)  # type: ignore[arg-type]

    def _bind(self, text: str, shape: LaunchShape) -> Any:
        """Compiles at the first launch: some tests only look at what would be launched."""

        def launch(address: int) -> None:
            run = self._built.get(text) or self._build(text)
            self._built[text] = run
            grid = CTAS, shape.threads, shape.shared_bytes
            assert run(address, *grid, self.order), f"all wait or go round, in order {self.order}"

        return lambda params: lambda _: launch(params.address)

    def _build(self, text: str) -> Any:
        library = compile_for_fibers(
            text + _HARNESS, self._folder / f"kernel{len(self._built)}.cpp"
        )
        run = library["emulate"]
        run.argtypes = (ctypes.c_void_p, *(ctypes.c_uint,) * 4)
        run.restype = ctypes.c_bool
        return run
