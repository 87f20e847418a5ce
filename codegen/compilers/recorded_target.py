"""Compilers that a cache was filled with, for machines that have none.

An entry's key holds what compiled it. Where no compiler is to be found, entries are looked up by
what the cache itself tells: each kernel in `key.json` names its compiler, and those for a host the
instruction sets that they need. Our own headers must be the same in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from warploom import env
from warploom.codegen.cache.facts import unsealed
from warploom.codegen.cache.folder import Untrusted
from warploom.codegen.cache.store import KEY_FILE, Store, warn_refused
from warploom.codegen.compilers import cpu_features
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.compilers.headers import header_digest
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.deployment_errors import WrongProcessor
from warploom.errors import NoCudaCompiler, NoHostCompiler

HOST = "host"  # of key.json: what of a host target the key does not hold
_TOOLS = ("nvrtc", "cutlass", "cccl", "cuda_headers")  # labels of `CudaToolchain.versions`
_HOST_PARTS = {"compiler", "flags", "macros"}


def host_facts(target: HostTarget) -> dict[str, Any]:
    """What `key.json` must tell of a host target, so that it can be recognised without it."""
    return {HOST: {"features": target.features, "needs": target.needs}}


def recorded_host(missing: NoHostCompiler) -> HostTarget:
    """The best target of those that filled the cache and that this processor can run.

    Args:
        missing: raised if the cache holds no kernel for a host.

    Raises:
        NoHostCompiler: it holds none.
        WrongProcessor: it holds some, all of which need what this processor does not have.
    """
    root = env.cache_dir()
    found = _hosts(root, _stamp(root))
    if not found:
        raise missing
    fitting = fitting_hosts()
    if fitting:
        return fitting[0]
    here, nearest = cpu_features.available(), found[-1]
    has = "nothing that /proc/cpuinfo tells" if here is None else _relevant(here, nearest.needs)
    lacks = [name for name in nearest.needs if name not in (here or ())]
    raise WrongProcessor(
        root=root, needs=" ".join(nearest.needs), has=has, lacks=" ".join(lacks)
    ) from missing


def fitting_hosts() -> list[HostTarget]:
    """All recorded targets whose instruction sets this processor has, the richest first."""
    root, here = env.cache_dir(), cpu_features.available()
    if here is None:
        return []
    return [
        found
        for found in _hosts(root, _stamp(root))
        if here.issuperset(found.needs) and found.sanitized == env.sanitize()
    ]


def recorded_tools(arch: Arch, missing: NoCudaCompiler | None = None) -> list[dict[str, str]]:
    """Parts of keys that name the CUDA compilers which filled the cache for an architecture.

    Raises:
        NoCudaCompiler: `missing`, if it was given and there are none.
    """
    root = env.cache_dir()
    found = [dict(tools) for name, tools in _toolchains(root, _stamp(root)) if name == arch.name]
    if missing is not None and not found:
        raise missing
    return found


def _relevant(here: frozenset[str], needs: tuple[str, ...]) -> str:
    """What a processor has of the families that are asked for; all of it would fill a screen."""
    families = ("sse", "avx", "amx", "fma", "f16c", "bmi", "model:")
    return " ".join(sorted(x for x in here if x in needs or x.startswith(families)))


@lru_cache(maxsize=4)
def _hosts(root: Path, _changed: int) -> tuple[HostTarget, ...]:
    headers, found = header_digest("cpu", "common"), dict[HostTarget, None]()
    for facts in _all_facts(root):
        parts, host = facts["parts"], facts.get(HOST)
        if host is not None and parts.get("headers") == headers and set(parts) >= _HOST_PARTS:
            features, needs = (tuple(host[name]) for name in ("features", "needs"))
            flags = tuple(parts["flags"].split(" "))
            target = HostTarget((), parts["compiler"], flags, features, parts["macros"], needs)
            found[target] = None
    return tuple(sorted(found, key=lambda x: (-len(x.needs), x.version, x.macros)))


@lru_cache(maxsize=4)
def _toolchains(root: Path, _changed: int) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """(architecture, parts of keys), the newest compiler first."""
    headers, found = header_digest("include", "common"), set()
    for facts in _all_facts(root):
        parts = facts["parts"]
        if parts.get("headers") == headers and {"target", *_TOOLS} <= set(parts):
            tools = {"headers": headers, **{name: parts[name] for name in _TOOLS}}
            found.add((parts["target"], tuple(tools.items())))
    return tuple(sorted(found, reverse=True))


def _all_facts(root: Path) -> Iterator[dict[str, Any]]:
    """Of each entry that can be read; whether its files are whole is seen when it is loaded."""
    try:
        kernels = Store(root).open("kernels")
    except Untrusted as problem:
        warn_refused(root, str(problem))
        return
    except OSError:  # there is none
        return
    with kernels:
        for name in kernels.names():
            try:
                with kernels.folder(name) as entry:
                    facts = unsealed(entry.read(KEY_FILE))
            except (OSError, ValueError, RecursionError):
                continue  # a damaged entry, which names no compiler
            yield facts


def _stamp(root: Path) -> int:
    """Changes when an entry comes or goes."""
    try:
        return (root / "kernels").stat().st_mtime_ns
    except OSError:
        return 0
