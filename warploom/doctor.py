"""What works on this machine, found out by trying it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from textwrap import fill
from typing import TYPE_CHECKING

from warploom import __version__, env
from warploom.deployment_errors import CacheNotWritable
from warploom.errors import WarploomError

if TYPE_CHECKING:
    from warploom.codegen.compilers.hostcc import HostTarget

_CUDA_TRIAL = """
#include <cute/tensor.hpp>
extern "C" __global__ void warploom_kernel(int* p) { *p = cute::Int<42>::value; }
"""


@dataclass(frozen=True)
class Finding:
    """One part: whether its back end can do without more, what was found or what to do, and which.

    `fault` is the word for what is wrong; a part may be missing, and its back end work.
    """

    part: str
    works: bool
    detail: str
    needed_by: str = ""
    fault: str = ""

    @property
    def state(self) -> str:
        return self.fault or ("works" if self.works else "missing")


def examine() -> list[Finding]:
    """Tries the cache folder, both compilers and the GPU; takes a second or two."""
    headers = _try("CUDA headers", _headers, "cuda")
    return [
        Finding("warploom", True, f"{__version__}, Python {platform.python_version()}"),
        _settings(),
        _try("cache folder", _cache),
        _host(),
        headers,
        _after(headers, _try("NVRTC", _nvrtc, "cuda")),
        _try("GPU", _gpu, "cuda"),
    ]


def working_back_ends(findings: Sequence[Finding]) -> list[str]:
    """The back ends of which every part works."""
    broken = {finding.needed_by for finding in findings if not finding.works}
    return sorted({finding.needed_by for finding in findings} - broken - {""})


def _try(part: str, check: Callable[[], str], needed_by: str = "") -> Finding:
    try:
        return Finding(part, True, check(), needed_by)
    except (WarploomError, OSError, ImportError) as error:
        return Finding(part, False, str(error), needed_by)


def _after(first: Finding, then: Finding) -> Finding:
    """A part that needs another: where that one is missing, its advice is not given twice."""
    if first.works or then.works or then.detail != first.detail:
        return then
    return replace(then, detail=f"not tried: it needs the {first.part}, see there")


def _settings() -> Finding:
    names = [setting.name for setting in env.SETTINGS if env.given(setting.name) is not None]
    wrong = [f"{name} is {problem}" for name in names if (problem := env.problem(name))]
    wrong += [f"{name}: {problem}" for name, problem in env.unknown().items()]
    good = f"of environment variables: {', '.join(names) or 'none'}"
    return Finding("settings", not wrong, "\n".join(wrong) or good, fault="wrong" if wrong else "")


def _cache() -> str:
    from warploom.codegen.cache.store import Store

    store = Store(env.cache_dir())
    try:
        with store.workshop():
            return str(store.root)
    except OSError as error:
        raise CacheNotWritable(root=store.root, reason=error.strerror or error) from error


def _host() -> Finding:
    """The compiler; where there is none, the one whose kernels the cache holds."""
    from warploom.codegen.compilers.hostcc import host_target

    found: list[HostTarget] = []

    def probed() -> str:
        found.append(host_target())
        parts = found[0].key_parts()
        flags = fill(parts["flags"], 90, break_on_hyphens=False)
        return f"{parts['compiler']}\n{flags}"  # the other parts are hashes, for the cache

    finding = _try("host compiler", probed, "cpu")
    if not found or found[0].command:
        return finding
    served = (
        f"no C++ compiler was found. Kernels of {found[0].version} in {env.cache_dir()} are served,"
        "\nand no others: a new variant raises NotInCache. Bring its kernels with warploom import,"
        "\nor install a compiler."
    )
    return replace(finding, detail=served, fault="missing")


def _headers() -> str:
    from warploom.codegen.compilers.headers import find_toolchain

    tools = find_toolchain()
    folders = "\n".join(str(folder) for folder in tools.include_dirs if folder.is_dir())
    return ", ".join(f"{name} {version}" for name, version in tools.versions) + "\n" + folders


def _nvrtc() -> str:
    from warploom.codegen.compilers.arch import ARCHS
    from warploom.codegen.compilers.nvrtc import run_nvrtc

    done = run_nvrtc(_CUDA_TRIAL, ARCHS["sm_90a"], "doctor", use_pch=False)
    return f"compiled CuTe in {done.seconds:.1f} s"


def _gpu() -> str:
    import torch

    from warploom.runtime.devices.device import cuda_facts, resolve_device

    facts = cuda_facts(resolve_device(torch.device("cuda")).index)
    return f"{facts.name}, {facts.arch.name}, {facts.num_sms} SMs"
