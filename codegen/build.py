"""Kernel source in, compiled kernel out: memory, then disk, then the compiler."""

from __future__ import annotations

import contextvars
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import warploom
from warploom import env, forks
from warploom.codegen.cache import upkeep
from warploom.codegen.cache.folder import Untrusted
from warploom.codegen.cache.key import CacheKey, make_key
from warploom.codegen.cache.store import Draft, Entry, Store, last_resort, sweep_spare, warn_refused
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.compilers.cubin import Resources
from warploom.codegen.compilers.options import CudaOptions
from warploom.codegen.source import KernelSource
from warploom.counters import count
from warploom.deployment_errors import NotInCache
from warploom.errors import (
    BuildFailed,
    CacheWarning,
    CompileError,
    CompileForbidden,
    NoCudaCompiler,
)
from warploom.logs import log

if TYPE_CHECKING:
    from warploom.codegen.compilers.hostcc import HostTarget

Job = tuple[KernelSource, "Arch | HostTarget"]

_PATIENCE_SECONDS = 0.3  # loads from the cache take less, and then nothing is shown


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel on disk.

    Attributes:
        path: the `.cubin` or `.so`.
        source_path: the source it was made of.
        entry: symbol to launch.
        resources: registers and memory of a CUDA kernel; None on a host.
        compile_seconds: what compiling took when it was compiled.
        compiled: whether that was now, and not a load from the cache.
        content: the bytes of the `.cubin` or `.so`, as they were checked: what is to be loaded.
    """

    path: Path
    source_path: Path
    entry: str
    resources: Resources | None
    compile_seconds: float
    compiled: bool
    content: bytes = field(repr=False)


_forbidden: ContextVar[str | None] = ContextVar("warploom_forbid_compilation", default=None)
_artifacts: dict[tuple[Path, str], Artifact] = {}
_pending: dict[tuple[Path, str], Future[Artifact]] = {}  # what some thread is building
_artifacts_lock = forks.lock()  # of both
_sweep_spare_once = lru_cache(sweep_spare)


@contextmanager
def forbid_compilation(cause: str = "forbid_compilation() is active") -> Iterator[None]:
    """Inside, a kernel that is in no cache raises CompileForbidden; for capture and for serving.

    It holds for this thread and for builds started from it, not for other threads. A kernel that
    one of those is compiling is waited for.

    Args:
        cause: why, for the error's message.
    """
    token = _forbidden.set(cause)
    try:
        yield
    finally:
        _forbidden.reset(token)


def build(source: KernelSource, target: Arch | HostTarget) -> Artifact:
    """The compiled kernel, from this process, from disk or from the compiler.

    Threads that ask for the same kernel at the same time wait for one compile.

    Raises:
        CompileForbidden: it is not cached, and compiling is forbidden.
        CompileError: it does not compile.
        NoCudaCompiler, NoHostCompiler: the compiler is missing.
    """
    key = content_key(source, target)
    return _shared(key, lambda: _load(key, source, target) or _compiled(key, source, target))


def content_key(source: KernelSource, target: Arch | HostTarget) -> CacheKey:
    """All that decides about the binary: source, target, compiler, flags and headers.

    Raises:
        NoCudaCompiler: the CUDA packages are missing, and the cache was filled with none.
    """
    return make_key(source, target, _tools(target))


def _other_keys(source: KernelSource, target: Arch | HostTarget) -> Iterator[CacheKey]:
    """Keys by which others may have compiled it, where this process may not or cannot."""
    from warploom.codegen.compilers.recorded_target import fitting_hosts, recorded_tools

    if isinstance(target, Arch):
        flags = {"flags": " ".join(_cuda_options().flags(target))}
        yield from (make_key(source, target, found | flags) for found in recorded_tools(target))
    else:
        yield from (make_key(source, found, {}) for found in fitting_hosts())


def build_all(jobs: Sequence[Job], progress: bool | None = None) -> list[Artifact]:
    """Builds several kernels in parallel; artifacts in the order of the jobs.

    Args:
        jobs: (source, target) pairs.
        progress: whether to show a progress bar; None asks the settings, then the terminal.

    Raises:
        BuildFailed: some did not compile; all others are built and cached nevertheless. If only
            one failed, its own error is raised.
    """
    results = build_each(jobs, progress)
    errors = [found for found in results if isinstance(found, BaseException)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise BuildFailed(
            count=len(errors), total=len(jobs), log="\n\n".join(str(error) for error in errors)
        ) from errors[0]
    return [found for found in results if isinstance(found, Artifact)]


def build_each(jobs: Sequence[Job], progress: bool | None = None) -> list[Artifact | BaseException]:
    """The same, with what was raised in the place of what could not be built."""
    with ThreadPoolExecutor(env.build_jobs()) as pool:
        futures = [  # each in a copy of the context: forbid_compilation() holds in the pool too
            pool.submit(contextvars.copy_context().run, partial(build, source, target))
            for source, target in jobs
        ]
        try:
            _wait([source.name for source, _ in jobs], futures, progress)
        except BaseException:  # the user's Ctrl-C ends what is queued too
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.exception() or future.result() for future in futures]


def _shared(key: CacheKey, make: Callable[[], Artifact]) -> Artifact:
    """`make()`, once per process; a failure is not remembered."""
    place = (env.cache_dir(), key.digest)
    with _artifacts_lock:
        found = _artifacts.get(place)
        if found is not None and os.path.exists(found.path):
            count("memory_hits")
            return found
        future = _pending.get(place)
        mine = future is None
        if future is None:
            future = _pending[place] = Future()
    if not mine:
        try:
            found = future.result()
            count("memory_hits")
            return found
        except CompileForbidden:  # to the thread that asked first
            if _why_forbidden():
                raise
            return _shared(key, make)
    try:
        artifact = make()
    except BaseException as error:
        with _artifacts_lock:
            del _pending[place]
        future.set_exception(error)
        raise
    with _artifacts_lock:
        _artifacts[place] = artifact
        del _pending[place]
    future.set_result(artifact)
    return artifact


# In a forked process nobody fills what the threads of its parent were about to.
forks.after(_pending.clear)


def _why_forbidden() -> str | None:
    """Why this thread may not compile, if it may not."""
    return "WARPLOOM_FORBID_COMPILE is set" if env.forbid_compile() else _forbidden.get()


def _tools(target: Arch | HostTarget) -> dict[str, str]:
    """Compiler, headers and flags of a CUDA target; a host target names its own."""
    if not isinstance(target, Arch):
        return {}
    from warploom.codegen.compilers.headers import find_toolchain

    try:
        parts = find_toolchain().key_parts()
    except NoCudaCompiler as missing:
        from warploom.codegen.compilers.recorded_target import recorded_tools

        parts = recorded_tools(target, missing)[0]
    return {**parts, "flags": " ".join(_cuda_options().flags(target))}


def _cuda_options() -> CudaOptions:
    return CudaOptions(line_info=env.line_info(), racecheck=env.racecheck())


def _load(key: CacheKey, source: KernelSource, target: Arch | HostTarget) -> Artifact | None:
    store = Store(env.cache_dir())
    entry = store.load(key)
    if entry is None and _only_loads(target):
        others = (store.load(other) for other in _other_keys(source, target))
        entry = next((found for found in others if found is not None), None)
        if entry is not None:
            log.info("%s: taken from another compiler or toolkit", source.name)
    count("misses" if entry is None else "disk_hits")
    where = store.root if entry is None else entry.folder
    log.debug("cache %s: %s in %s", "miss" if entry is None else "hit", source.name, where)
    return None if entry is None else _artifact(entry, source.entry, compiled=False)


def _only_loads(target: Arch | HostTarget) -> bool:
    """True if this process may not compile for a target, or cannot."""
    if isinstance(target, Arch):
        return _why_forbidden() is not None or not _has_toolchain()
    from warploom.codegen.compilers.hostcc import host_target

    # another target than this machine's own was asked for by its flags
    forbidden = _why_forbidden() is not None and target == host_target()
    return forbidden or not target.command


def _has_toolchain() -> bool:
    from warploom.codegen.compilers.headers import find_toolchain

    try:
        find_toolchain()
    except NoCudaCompiler:
        return False
    return True


def _compiled(key: CacheKey, source: KernelSource, target: Arch | HostTarget) -> Artifact:
    """`_compile`, counted and logged."""
    log.info("compiling %s", source.name)
    begin = time.perf_counter()
    made = _compile(key, source, target)
    seconds = time.perf_counter() - begin
    count("compiles")
    count("compile_seconds", seconds)
    log.info("compiled %s in %.1f s", source.name, seconds)
    return made


def _compile(key: CacheKey, source: KernelSource, target: Arch | HostTarget) -> Artifact:
    cause = _why_forbidden()
    if cause:
        raise CompileForbidden(kernel=source.name, cause=cause)
    if not isinstance(target, Arch) and not target.command:
        raise NotInCache(kernel=source.name, root=env.cache_dir())
    _sweep_spare_once()
    store = Store(env.cache_dir())
    name = "kernel.cu" if isinstance(target, Arch) else "kernel.cpp"
    text = source.text.encode()
    try:
        binary, facts = _run_compiler(source, target, store.failed / key.folder / name)
    except CompileError as error:
        kept = _write(lambda place: place.keep_failed(key, name, text))
        raise CompileError(**{**error.facts, "path": kept}) from None
    facts |= {"labels": dict(source.labels), "warploom": warploom.__version__}
    if not isinstance(target, Arch):
        from warploom.codegen.compilers.recorded_target import host_facts

        facts |= host_facts(target)
    draft = Draft((name, text), binary, facts)
    entry = _write(lambda place: place.save(key, draft))
    upkeep.sweep_daily(store)
    return _artifact(entry, source.entry, compiled=True)


def _run_compiler(
    source: KernelSource, target: Arch | HostTarget, kept: Path
) -> tuple[tuple[str, bytes], dict[str, Any]]:
    """(name and bytes of the binary, facts for key.json)."""
    if isinstance(target, Arch):
        from warploom.codegen.compilers.cubin import read_resources
        from warploom.codegen.compilers.nvrtc import run_nvrtc

        done = run_nvrtc(source.text, target, source.name, options=_cuda_options(), kept=kept)
        resources = asdict(read_resources(done.cubin, source.entry))
        resources["spill_bytes"] = done.spill_bytes
        facts = {"compile_seconds": done.seconds, "pch": done.pch, "resources": resources}
        return ("kernel.cubin", done.cubin), facts
    from warploom.codegen.compilers.hostcc import compile_cpp

    begin = time.perf_counter()
    library = compile_cpp(source, target, kept=kept)
    return ("kernel.so", library), {"compile_seconds": time.perf_counter() - begin}


def _write(write: Callable[[Store], Any]) -> Any:
    """Writes to the cache, or, if that fails, to a folder of this process."""
    root = env.cache_dir()
    try:
        return write(Store(root))
    except Untrusted as error:
        warn_refused(root, str(error))
    except OSError as error:
        _warn_unwritable(root, error.strerror or str(error))
    with last_resort(root) as spare:
        return write(spare)


@lru_cache
def _warn_unwritable(root: Path, reason: str) -> None:  # cached: once per folder and reason
    warnings.warn(
        f"the cache in {root} cannot be written ({reason}); what this process compiles is lost "
        "when it ends. Set WARPLOOM_CACHE_DIR to a writable folder.",
        CacheWarning,
        stacklevel=2,
    )


def _artifact(entry: Entry, symbol: str, compiled: bool) -> Artifact:
    resources = entry.facts.get("resources")
    return Artifact(
        path=entry.binary,
        source_path=entry.source,
        entry=symbol,
        resources=Resources(**resources) if resources else None,
        compile_seconds=entry.facts.get("compile_seconds", 0.0),
        compiled=compiled,
        content=entry.content,
    )


def _wait(names: Sequence[str], futures: Sequence[Future[Artifact]], wanted: bool | None) -> None:
    """Waits for all, with a progress bar on stderr if it takes long enough for a person to ask.

    Where stderr is no terminal, a line takes the place of the bar.
    """
    wanted = env.show_progress() if wanted is None else wanted
    if wanted is False:
        wait(futures)
        return
    done, pending = wait(futures, timeout=_PATIENCE_SECONDS)
    if not pending:
        return
    if wanted is None and not sys.stderr.isatty():  # a sign of life in a log
        count = f"{len(pending)} kernel{'s' if len(pending) > 1 else ''}"
        sys.stderr.write(f"warploom: compiling {count}\n")
        wait(futures)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    console = Console(stderr=True)
    name_of = dict(zip(futures, names, strict=True))
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:
        task = bar.add_task("", total=len(futures), completed=len(done))
        for future in as_completed(pending):
            bar.update(task, advance=1, description=name_of[future])
