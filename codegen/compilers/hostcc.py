"""C++ text to a shared library, through the machine's own compiler."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import warploom.templates
from warploom import env
from warploom.codegen.cache.store import Store, Workshop, last_resort
from warploom.codegen.compilers import cpu_features
from warploom.codegen.compilers.compiler_log import first_errors
from warploom.codegen.compilers.headers import header_digest
from warploom.codegen.source import KernelSource
from warploom.deployment_errors import UnknownProcessor
from warploom.errors import BadSetting, CompileError, NoHostCompiler

_TEMPLATES = Path(warploom.templates.__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
_NATIVE = ("-march=native", "-mcpu=native", "")  # x86 and most others, Arm with clang, any
_WORD = re.compile(r"[\w.+-]+")  # of flags, which keys keep in one line
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    # Compilers that fuse products and sums take either product of `a * b + c * d`, and another one
    # in the masked loop than in the other: a row's bits would depend on the rows beside it. What
    # should be fused says so (`fma`, `fma_vec`).
    "-ffp-contract=off",
    "-fno-math-errno",  # errno and traps would forbid vectors
    "-fno-trapping-math",  # infinities and NaN keep their meaning
    # GCC 12 keeps ranges that it inferred from signed arithmetic on one path when it moves that
    # arithmetic to others, and tiles were hidden that a mask shows.
    "-fwrapv",
)
_GCC_FLAGS = (
    "-fno-code-hoisting",  # which is what moves it
    # GCC 13.3 makes conditions of unswitched loops out of values that are not defined yet
    # (https://gcc.gnu.org/PR109934), and planners gave rows that see keys none.
    "-fno-unswitch-loops",
)
# Instead of crashing now and then, or of computing nonsense in silence, a process ends at once.
_SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",  # so that reports name lines
    "-fno-wrapv",  # an overflow that nothing wraps on purpose is told
    "-O1",  # instead of -O3 before it: checks in the unrolled loops take compilers very long
)
# What the headers ask of a machine; shown to the user, and part of the target's name.
_FEATURES = (
    "__AMX_BF16__",
    "__AVX512BF16__",
    "__AVX512F__",
    "__AVX2__",
    "__AVX__",
    "__F16C__",
    "__FMA__",
    "__ARM_NEON",
    "__SSE2__",
)


@dataclass(frozen=True)
class HostTarget:
    """A host compiler and the machine it compiles for.

    Attributes:
        command: the compiler, with arguments if CXX has some; empty where there is none, and the
            target is one that the cache was filled with.
        version: first line of what it says about itself.
        flags: options, those of the machine first.
        features: macros of the instruction sets our headers look for.
        macros: digest of everything the compiler predefines with these flags: its version, its
            target and each instruction set.
        needs: what a processor must have to run its code, as `cpu_features` names it.
    """

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    features: tuple[str, ...]
    macros: str
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def sanitized(self) -> bool:
        """Whether its code runs only where the library of AddressSanitizer is loaded."""
        return _SANITIZE[0] in self.flags

    @property
    def vector_bytes(self) -> int:
        """Width of the vectors that kernels use."""
        return 64 if "__AVX512F__" in self.features else 32 if "__AVX__" in self.features else 16

    def key_parts(self) -> dict[str, str]:
        """What of the target a cache key must hold."""
        return {
            "compiler": self.version,
            "flags": " ".join((*self.command[1:], *self.flags)),
            "headers": header_digest("cpu", "common"),
            "macros": self.macros,
        }


def host_target() -> HostTarget:
    """The compiler named by CXX, or the first that is found, probed once.

    Where CXX names none and none is found, the target that the cache was filled with; so too where
    CXX names none that works and compiling is forbidden, which asks for no compiler.

    Raises:
        NoHostCompiler: there is none that works, and the cache holds no kernel for a host.
        WrongProcessor: likewise, and this processor cannot run what it holds.
        BadSetting: WARPLOOM_SANITIZE is set, and the sanitizers' library is not loaded.
    """
    if env.sanitize() and not _has_sanitizer():
        named = (f"$(c++ -print-file-name={name})" for name in ("libasan.so", "libstdc++.so.6"))
        preload = f'LD_PRELOAD="{" ".join(named)}"'
        raise BadSetting(
            name="WARPLOOM_SANITIZE", value="1", expected=f"0, or a process started with {preload}"
        )
    try:
        return _probe(env.cxx(), _SANITIZE if env.sanitize() else ())
    except NoHostCompiler as missing:
        if env.cxx() and not env.forbid_compile():
            raise
        from warploom.codegen.compilers.recorded_target import recorded_host

        found: HostTarget = recorded_host(missing)  # pyright: ignore[reportAssignmentType]
        return found


def host_target_for(processor: str) -> HostTarget:
    """The target of this machine's compiler for another processor.

    Args:
        processor: as the compiler names it, such as x86-64-v3; "native" is this machine's own.

    Raises:
        NoHostCompiler: there is no compiler.
        UnknownProcessor: it knows no such processor.
    """
    if processor == "native":
        return host_target()
    own = _probe(env.cxx(), ())
    option = "-march=" if platform.machine() in cpu_features.X86 else "-mcpu="
    found = probe(own.command, option + processor) if _WORD.fullmatch(processor) else None
    if found is None:
        raise UnknownProcessor(name=processor, compiler=own.version, option=option)
    return found


def probe(command: tuple[str, ...], machine: str, more: tuple[str, ...] = ()) -> HostTarget | None:
    """The target of one compiler with one machine flag; None if it cannot compile C++17 for it.

    Args:
        command: the compiler.
        machine: the flag that names the machine, or nothing.
        more: flags behind all others.
    """
    flags = (*([machine] if machine else ()), *_FLAGS, *more)
    macros = _run((*command, *flags, "-dM", "-E", "-x", "c++", "-"), "")
    version = _run((*command, "--version"), "")
    if macros is None or version is None:
        return None
    defined = set(re.findall(r"^#define (\w+)", macros, re.MULTILINE))
    features = tuple(name for name in _FEATURES if name in defined)
    if "__GNUC__" in defined and "__clang__" not in defined:
        flags += _GCC_FLAGS
    if "__AVX512F__" in features:  # compilers default to half the width
        flags = (flags[0], "-mprefer-vector-width=512", *flags[1:])
    digest = hashlib.sha256(macros.encode()).hexdigest()
    needs = cpu_features.needed(defined, platform.machine())
    return HostTarget(command, version.partition("\n")[0], flags, features, digest, needs)


def compile_cpp(source: KernelSource, target: HostTarget, *, kept: Path | None = None) -> bytes:
    """Compiles one kernel.

    Args:
        source: rendered source.
        target: compiler and machine.
        kept: where the source is or will be kept, to be named in errors.

    Returns:
        The shared library.

    Raises:
        CompileError: the source does not compile.
        NoHostCompiler: the compiler is gone.
        NowhereToWrite: there is no folder to compile in.
    """
    try:
        with Store(env.cache_dir()).workshop() as workshop:
            return _compile_in(workshop, source, target, kept)
    except OSError:  # the cache is not ours to write, or there is no room
        with last_resort(env.cache_dir()) as spare, spare.workshop() as workshop:
            return _compile_in(workshop, source, target, kept)


def _compile_in(
    workshop: Workshop, source: KernelSource, target: HostTarget, kept: Path | None
) -> bytes:
    """The library; all that is written on the way, the compiler's own files too, lies there.

    Raises:
        OSError: it cannot be written.
    """
    includes = [f"-I{_TEMPLATES / folder}" for folder in ("cpu", "common")]
    workshop.folder.write("kernel.cpp", source.text.encode())
    text, library = (f"{workshop.place}/{name}" for name in ("kernel.cpp", "kernel.so"))
    command = [*target.command, *target.flags, *includes, text, "-o", library]
    done = _started(command, env.compiler_environment(temporary=workshop.place))
    if done.returncode == 0:
        return workshop.folder.read("kernel.so")
    for code in (errno.ENOSPC, errno.EDQUOT):
        if os.strerror(code) in done.stderr:
            raise OSError(code, os.strerror(code))
    log = done.stderr.replace(text, str(kept or f"{source.name}.cpp"))
    raise CompileError(
        compiler=target.version, kernel=source.name, path=kept or "nowhere", log=first_errors(log)
    )


def _started(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return _output_of(command, environment)
    except OSError as error:
        raise NoHostCompiler(tried=command[0]) from error


@lru_cache(maxsize=4)
def _probe(chosen: str | None, more: tuple[str, ...]) -> HostTarget:
    commands = [tuple(shlex.split(chosen))] if chosen else [(name,) for name in _COMPILERS]
    for command in commands:
        if shutil.which(command[0]) is None:
            continue
        for machine in _NATIVE:
            target = probe(command, machine, more)
            if target is not None:
                return target
    raise NoHostCompiler(tried=", ".join(" ".join(command) for command in commands))


def _has_sanitizer() -> bool:
    """Whether the library of AddressSanitizer was loaded before all others, as it must be."""
    return hasattr(ctypes.CDLL(None), "__asan_init")


def _output_of(
    command: Sequence[str], environment: dict[str, str], text: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, input=text, capture_output=True, text=True, errors="replace", env=environment
    )


def _run(command: tuple[str, ...], text: str) -> str | None:
    try:
        done = _output_of(command, env.compiler_environment(), text)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
