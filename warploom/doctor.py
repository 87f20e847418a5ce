"""What works on this machine, found out by trying it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import fill

from warploom import __version__, env
from warploom.errors import WarploomError

_CUDA_TRIAL = """
#include <cute/tensor.hpp>
extern "C" __global__ void warploom_kernel(int* p) { *p = cute::Int<42>::value; }
"""


@dataclass(frozen=True)
class Finding:
    """One part: whether it works, what was found or what to do, and the back end that needs it.

    `fault` is the word for what does not work.
    """

    part: str
    works: bool
    detail: str
    needed_by: str = ""
    fault: str = "missing"


def examine() -> list[Finding]:
    """Tries the cache folder, both compilers and the GPU; takes a second or two."""
    return [
        Finding("warploom", True, f"{__version__}, Python {platform.python_version()}"),
        _settings(),
        _try("cache folder", _cache),
        _try("host compiler", _host, "cpu"),
        _try("CUDA headers", _headers, "cuda"),
        _try("NVRTC", _nvrtc, "cuda"),
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


def _settings() -> Finding:
    names = [setting.name for setting in env.SETTINGS if env.given(setting.name) is not None]
    wrong = [f"{name} is {problem}" for name in names if (problem := env.problem(name))]
    wrong += [f"{name}: {problem}" for name, problem in env.unknown().items()]
    good = f"of environment variables: {', '.join(names) or 'none'}"
    return Finding("settings", not wrong, "\n".join(wrong) or good, fault="wrong")


def _cache() -> str:
    from warploom.codegen.cache.store import Store

    store = Store(env.cache_dir())
    with store.workshop():
        return str(store.root)


def _host() -> str:
    from warploom.codegen.compilers.hostcc import host_target

    parts = host_target().key_parts()
    flags = fill(parts["flags"], 90, break_on_hyphens=False)
    return f"{parts['compiler']}\n{flags}"  # the other parts are hashes, for the cache


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
