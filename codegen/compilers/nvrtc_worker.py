"""The process in which NVRTC runs.

NVRTC compiles one program at a time per process, so kernels built in parallel need processes. A
process of its own also gives back the compiler's memory, confines a crash of the compiler, and may
pin the heap of precompiled headers to an address (see `_reserve_high_addresses`).
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any, BinaryIO, Literal

PchMode = Literal["off", "use", "create"]
PchResult = Literal["off", "used", "rejected", "created", "failed"]

PCH_HEAP_BYTES = 600 << 20
_PCH_HEAP_ADDRESS = 0x6A00_0000_0000  # free in every process: between the program and its libraries
_SCRATCH_BYTES = 512 << 20
_NOT_ATTEMPTED = 13  # NVRTC_ERROR_NO_PCH_CREATE_ATTEMPTED: an error in the source came first


@dataclass(frozen=True)
class Request:
    """One program to compile; `pch` is a file to read or to make, as `pch_mode` says."""

    libraries: tuple[str, ...]
    text: str
    file_name: str
    flags: tuple[str, ...]
    pch_mode: PchMode = "off"
    pch: str = ""


@dataclass(frozen=True)
class Reply:
    """What NVRTC answered; without a cubin, the log says why."""

    cubin: bytes | None
    log: str
    pch: PchResult = "off"
    missing: str = ""  # package that could not be imported or loaded


def main() -> None:
    """Reads a pickled Request from stdin and writes a pickled Reply to stdout."""
    request: Request = pickle.load(sys.stdin.buffer)
    with _own_stdout() as out:
        pickle.dump(compile_program(request, own_process=True), out)


def compile_program(request: Request, own_process: bool) -> Reply:
    """Compiles in this process; precompiled headers are used only if it is the worker's own."""
    try:
        for library in request.libraries:  # the bindings take what is already loaded
            ctypes.CDLL(library)
        nvrtc: Any = import_module("cuda.bindings.nvrtc")  # optional, and without types
    except (ImportError, OSError) as error:
        return Reply(None, str(error), missing="cuda-bindings (or the library of NVRTC)")
    mode = request.pch_mode if own_process else "off"
    flags = list(request.flags)
    if mode != "off":
        _reserve_high_addresses()
        nvrtc.nvrtcSetPCHHeapSize(PCH_HEAP_BYTES)
        flags += [f"--{mode}-pch={request.pch}", "--pch-verbose=true"]
    _, program = nvrtc.nvrtcCreateProgram(
        request.text.encode(), request.file_name.encode(), 0, None, None
    )
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    text = log.rstrip(b"\0").decode(errors="replace")
    image = _pch_result(mode, text, int(nvrtc.nvrtcGetPCHCreateStatus(program)[0]))
    if int(status) == 0:
        cubin = _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        reply = Reply(cubin, text, image)
    else:
        _, reason = nvrtc.nvrtcGetErrorString(status)
        reply = Reply(None, text or reason.decode(), image)
    nvrtc.nvrtcDestroyProgram(program)
    return reply


def _fetch(get_size: Any, get: Any, program: Any) -> bytes:
    _, size = get_size(program)
    buffer = bytes(size)  # the bindings write into the bytes object
    get(program, buffer)
    return buffer


def _pch_result(mode: PchMode, log: str, create_status: int) -> PchResult:
    if mode == "use":
        return "used" if "using precompiled header file" in log else "rejected"
    if mode == "create" and create_status != _NOT_ATTEMPTED:
        return "created" if create_status == 0 and _heap_is_in_place() else "failed"
    return "off"


def _reserve_high_addresses() -> None:
    """Makes the next large allocation land at `_PCH_HEAP_ADDRESS`.

    A precompiled header is an image of NVRTC's heap, and is refused when the reader's heap lies
    elsewhere, as address randomisation makes it. NVRTC leaves the choice of the place to Linux,
    which takes the highest free gap that is large enough. So every such gap above our address is
    reserved (no memory is used), but for a rest too small for the heap that serves others.
    """
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    no_access, private_anonymous_noreserve_fixed_noreplace = 0, 0x2 | 0x20 | 0x4000 | 0x100000
    end_of_heap = _PCH_HEAP_ADDRESS + PCH_HEAP_BYTES
    for begin, end in _gaps(end_of_heap):
        if end - begin >= PCH_HEAP_BYTES:
            length = end - begin - _SCRATCH_BYTES
            libc.mmap(begin, length, no_access, private_anonymous_noreserve_fixed_noreplace, -1, 0)


def _gaps(above: int) -> list[tuple[int, int]]:
    """Free address ranges of this process from `above` on, but the one behind the last mapping."""
    gaps = []
    for begin, end in _mappings():
        if begin > above:
            gaps.append((above, begin))
        above = max(above, end)
    return gaps


def _heap_is_in_place() -> bool:
    return any(begin == _PCH_HEAP_ADDRESS for begin, _ in _mappings())


def _mappings() -> list[tuple[int, int]]:
    ranges = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, _, end = line.split(maxsplit=1)[0].partition("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return sorted(ranges)


def _own_stdout() -> BinaryIO:
    """The real stdout; what libraries print from now on goes to stderr, not into the reply."""
    import os

    reply = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return reply
