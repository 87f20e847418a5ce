"""CUDA C++ text to cubin, through NVRTC in a worker process; needs no GPU and no driver."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import warploom
from warploom import env
from warploom.codegen.compilers import pch
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.compilers.compiler_log import first_errors
from warploom.codegen.compilers.cubin import has_broken_copies
from warploom.codegen.compilers.headers import CudaToolchain, find_toolchain
from warploom.codegen.compilers.nvrtc_worker import PchResult, Reply, Request, compile_program
from warploom.codegen.compilers.options import CudaOptions
from warploom.errors import CompileError, NoCudaCompiler

# Isolated (-I), Python looks for modules neither in the working folder nor where variables say;
# then the worker gets the path of this process, without the working folder.
_WORKER = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from warploom.codegen.compilers.nvrtc_worker import main; main()"
)
_BROKEN_COPIES = (
    "the compiler wrote a copy to shared memory that no GPU takes, a fault of CUDA 13.0 that "
    "13.5 does not have: install a newer nvidia-cuda-nvrtc, or choose another tile"
)
_SPILLS = re.compile(r"(\d+) bytes spill (?:stores|loads)")


@dataclass(frozen=True)
class Compiled:
    """A cubin, the compiler's log and how long it took (seconds)."""

    cubin: bytes
    log: str
    seconds: float
    pch: PchResult

    @property
    def spill_bytes(self) -> int:
        """Bytes of spill stores and loads of all kernels, as ptxas reports them."""
        return sum(int(number) for number in _SPILLS.findall(self.log))


def compile_cuda(text: str, arch: Arch, name: str = "kernel") -> bytes:
    """The cubin of this source with the default options; see `run_nvrtc`."""
    return run_nvrtc(text, arch, name).cubin


def run_nvrtc(
    text: str,
    arch: Arch,
    name: str = "kernel",
    *,
    options: CudaOptions | None = None,
    kept: Path | None = None,
    use_pch: bool = True,
) -> Compiled:
    """Compiles one source.

    Args:
        text: CUDA C++ source.
        arch: architecture of the cubin.
        name: kernel name for messages.
        options: compiler options; default `CudaOptions()`.
        kept: where the source is or will be kept, to be named in errors.
        use_pch: whether precompiled headers may be read and made, if the settings allow them.

    Raises:
        CompileError: the source does not compile, or the compiler broke down.
        NoCudaCompiler: a CUDA package is missing.
    """
    options = options or CudaOptions()
    done = _run(text, arch, name, options, kept, use_pch)
    if has_broken_copies(done.cubin):
        done = _run(text, arch, name, replace(options, cache_hints=False), kept, use_pch=False)
        if has_broken_copies(done.cubin):
            raise _refused("error: " + _BROKEN_COPIES, find_toolchain(), name, kept)
    return done


def _run(
    text: str, arch: Arch, name: str, options: CudaOptions, kept: Path | None, use_pch: bool
) -> Compiled:
    tools = find_toolchain()
    flags = (*options.flags(arch), *tools.include_flags())
    image = pch.choose(
        env.cache_dir() / "pch" if use_pch and _pch_works(tools) else None,
        text,
        (*flags, *(f"{label}={value}" for label, value in tools.key_parts().items())),
    )
    request = Request(
        libraries=tuple(str(library) for library in tools.nvrtc),
        text=text,
        file_name=f"{name}.cu",
        flags=(*flags, *_uncached(tools)),
        pch_mode=image.mode,
        pch=str(image.path),
    )
    begin = time.perf_counter()
    reply = Reply(None, "")
    try:
        reply = _in_worker(request)
    finally:
        image.finish(reply.pch)
    if reply.missing:
        raise NoCudaCompiler(
            what=f"{reply.missing}: {reply.log};", extra=f"cu{tools.nvrtc_version[0]}"
        )
    if reply.cubin is None:
        raise _refused(reply.log, tools, name, kept)
    return Compiled(reply.cubin, reply.log, time.perf_counter() - begin, reply.pch)


def _refused(log: str, tools: CudaToolchain, name: str, kept: Path | None) -> CompileError:
    return CompileError(
        compiler="NVRTC {}.{}".format(*tools.nvrtc_version),
        kernel=name,
        path=kept or "nowhere",
        log=first_errors(with_places(log, f"{name}.cu", str(kept or f"{name}.cu"))),
    )


def with_places(log: str, file_name: str, shown: str) -> str:
    """NVRTC's `file(line)` as `shown:line`, which terminals and editors can follow."""
    return re.sub(rf"^{re.escape(file_name)}\((\d+)\)", rf"{shown}:\1", log, flags=re.M)


def _pch_works(tools: CudaToolchain) -> bool:
    return env.use_pch() and tools.nvrtc_version >= (12, 8)


def _uncached(tools: CudaToolchain) -> tuple[str, ...]:
    # NVRTC has a cache of its own from 12.9 on; two caches would only hold everything twice.
    return ("--no-cache",) if tools.nvrtc_version >= (12, 9) else ()


def _in_worker(request: Request) -> Reply:
    python = [sys.executable or "python3", "-I", "-c", _WORKER]
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    path.append(str(Path(warploom.__file__).absolute().parents[1]))  # if it was the working folder
    try:
        done = subprocess.run(
            [*python, *path],
            input=pickle.dumps(request),
            capture_output=True,
            env=env.compiler_environment(),
        )
    except OSError:  # no Python to start, as in an embedded interpreter
        return compile_program(request, own_process=False)
    if done.returncode == 0:
        reply: Reply = pickle.loads(done.stdout)
        return reply
    if request.pch_mode != "off":  # a damaged image can take the compiler down: once more without
        plain = _in_worker(replace(request, pch_mode="off"))
        return replace(plain, pch="failed" if request.pch_mode == "create" else "rejected")
    tail = done.stderr.decode(errors="replace").strip()[-2000:]
    return Reply(None, f"error: the compiler's process ended with status {done.returncode}\n{tail}")
