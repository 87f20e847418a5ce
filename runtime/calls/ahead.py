"""Kernels built ahead of time, for container images and deployments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warploom import env
from warploom.codegen.build import Artifact, Job, build_each, content_key
from warploom.codegen.cache.store import Store
from warploom.codegen.compilers.arch import ARCHS, Arch
from warploom.codegen.compilers.hostcc import HostTarget, host_target_for
from warploom.deployment_errors import CacheNotWritable
from warploom.errors import ArgumentError, BuildFailed, UnknownArchitecture
from warploom.runtime.wrappers.declaration import Declaration

CPU = "cpu"


@dataclass(frozen=True)
class BuiltKernel:
    """The result of building one kernel.

    Attributes:
        name: readable name, as in the cache's folders.
        labels: label -> value pairs that describe the kernel.
        target: architecture, or cpu.
        state: "built" now, "present" in the cache before, or "failed".
        seconds: time that compiling took, now or earlier; 0 for a failed kernel.
        bytes: size of source and binary; 0 for a failed kernel.
        error: why it failed, or None.
    """

    name: str
    labels: Mapping[str, str]
    target: str
    state: Literal["built", "present", "failed"]
    seconds: float = 0.0
    bytes: int = 0
    error: BaseException | None = None


@dataclass(frozen=True)
class BuildReport:
    """The results of building all kernels of a deployment, in the order of its declarations."""

    kernels: tuple[BuiltKernel, ...]

    def of(self, state: Literal["built", "present", "failed"]) -> tuple[BuiltKernel, ...]:
        """The kernels in one state."""
        return tuple(kernel for kernel in self.kernels if kernel.state == state)

    def check(self) -> None:
        """Raise BuildFailed if several kernels failed; if only one did, raise its own error."""
        errors = [str(kernel.error) for kernel in self.of("failed")]
        if len(errors) == 1:
            (failed,) = self.of("failed")
            assert failed.error is not None
            raise failed.error
        if errors:
            log = "\n\n".join(dict.fromkeys(errors))
            raise BuildFailed(count=len(errors), total=len(self.kernels), log=log)


def build_kernels(
    declarations: Declaration | Iterable[Declaration],
    *,
    archs: Iterable[str],
    processors: Iterable[str] = ("native",),
    progress: bool | None = None,
) -> BuildReport:
    """Build all kernels that wrappers of these declarations can request for any batch.

    No GPU is needed: for each architecture, the rules that choose kernels at run time list them
    here. Kernels go to the cache (`WARPLOOM_CACHE_DIR`), from which a process without a compiler
    can load them; `export_kernels` packs the cache into one file.

    Args:
        declarations: what the deployment will run.
        archs: back ends to build for: sm_80, sm_90a, ..., and cpu.
        processors: processors that host code is compiled for (CPU kernels, and the planner that all
            back ends use), as the host's compiler names them; "native" is this machine's own.
        progress: whether to show a progress bar; by default the settings, then the terminal decide.

    Returns:
        The result for each kernel.

    Raises:
        VariantError, UnsupportedSpec, BadHeadDim, ArgumentError: one of the back ends does not
            support a declaration; nothing is built then.
        UnknownArchitecture, UnknownProcessor: no such back end, or no such processor.
        NoCudaCompiler, NoHostCompiler: the compiler is missing.
        BuildFailed, CompileError, CacheNotWritable: some kernels could not be built; all others
            were.
    """
    report = build_ahead(declarations, archs, processors, progress)
    report.check()
    return report


def build_ahead(
    declarations: Declaration | Iterable[Declaration],
    archs: Iterable[str],
    processors: Iterable[str] = ("native",),
    progress: bool | None = None,
) -> BuildReport:
    """`build_kernels`, but kernels that fail to build are only reported, not raised."""
    for argument, given in (("archs", archs), ("processors", processors)):
        if isinstance(given, str):
            reason = f"is {given!r}; expected several names, such as [{given!r}]"
            raise ArgumentError(name=argument, reason=reason)
    hosts = [host_target_for(name) for name in processors]
    targets = [target for name in archs for target in _targets(name, hosts)]
    if not targets:
        raise ArgumentError(name="archs", reason="names no back end to build for")
    jobs = _distinct(_jobs(_listed(declarations), targets, hosts))
    store = Store(env.cache_dir())
    before = {digest for digest, job in jobs.items() if store.load(content_key(*job)) is not None}
    results = build_each(list(jobs.values()), progress)
    outcomes = zip(jobs.items(), results, strict=True)
    return BuildReport(
        tuple(
            _outcome(job, result, digest in before, store.kernels)
            for (digest, job), result in outcomes
        )
    )


def _listed(declarations: Declaration | Iterable[Declaration]) -> list[Declaration]:
    given = [declarations] if isinstance(declarations, Declaration) else list(declarations)
    for one in given:
        if not isinstance(one, Declaration):
            reason = f"hold {one!r}; expected AttentionDeclaration and the like"
            raise ArgumentError(name="declarations", reason=reason)
    return given


def _targets(name: str, hosts: Sequence[HostTarget]) -> Sequence[Arch | HostTarget]:
    if name == CPU:
        return hosts
    if name not in ARCHS:
        raise UnknownArchitecture(name=name, known=", ".join((*ARCHS, CPU)))
    return [ARCHS[name]]


def _jobs(
    declarations: Sequence[Declaration],
    targets: Sequence[Arch | HostTarget],
    hosts: Sequence[HostTarget],
) -> Iterator[Job]:
    for declaration in declarations:
        for target in targets:
            yield from declaration.jobs(target, hosts)


def _distinct(jobs: Iterable[Job]) -> dict[str, Job]:
    """Jobs by the digest of all that determines the binary: declarations may share kernels."""
    found: dict[str, Job] = {}
    for source, target in jobs:
        found.setdefault(content_key(source, target).digest, (source, target))
    return found


def _outcome(
    job: Job, result: Artifact | BaseException, before: bool, kernels: Path
) -> BuiltKernel:
    source, target = job
    what = source.name, dict(source.labels), target.name
    if isinstance(result, BaseException):
        return BuiltKernel(*what, "failed", error=result)
    reason = None
    if not result.path.is_relative_to(kernels):  # the kernel is lost with this process
        reason = "it is read-only, full or no folder"
    try:
        size = sum(path.stat().st_size for path in (result.path, result.source_path))
    except OSError as gone:  # removed by the cache's limits, or by another process
        reason, size = str(gone), 0
    if reason is not None:
        error = CacheNotWritable(root=kernels.parent, reason=reason)
        return BuiltKernel(*what, "failed", error=error)
    state: Literal["built", "present"] = "built" if result.compiled and not before else "present"
    return BuiltKernel(*what, state, result.compile_seconds, size)
