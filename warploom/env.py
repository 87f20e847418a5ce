"""Every environment variable, read here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from warploom.errors import BadSetting


@dataclass(frozen=True)
class Setting:
    """One variable: its name, what it does, and what holds without it (for docs and the CLI)."""

    name: str
    meaning: str
    default: str


SETTINGS = (
    Setting("WARPLOOM_CACHE_DIR", "folder of the compiled kernels", "the user's cache folder"),
    Setting(
        "WARPLOOM_CACHE_SIZE",
        "limit of the cache in MiB; what was used longest ago goes first",
        "4096",
    ),
    Setting("WARPLOOM_CACHE_AGE", "days an unused entry is kept", "90"),
    Setting("WARPLOOM_FORBID_COMPILE", "1 makes any compilation an error", "unset"),
    Setting("WARPLOOM_BUILD_JOBS", "kernels compiled at the same time", "number of CPUs"),
    Setting("WARPLOOM_PCH", "0 turns precompiled CUDA headers off", "1"),
    Setting("WARPLOOM_LINE_INFO", "1 compiles CUDA kernels with source lines, for profilers", "0"),
    Setting(
        "WARPLOOM_RACECHECK",
        "1 compiles CUDA kernels whose barriers compute-sanitizer's racecheck follows; slower",
        "0",
    ),
    Setting(
        "WARPLOOM_SANITIZE",
        "1 compiles CPU kernels and planners with AddressSanitizer and UBSan, whose runtime "
        "library LD_PRELOAD must name; slower",
        "0",
    ),
    Setting(
        "WARPLOOM_VERIFY_PLANS",
        "1 checks every plan before it runs",
        "0",
    ),
    Setting(
        "WARPLOOM_MIXED_ROLES",
        "0 gives batches of prefills and decodes one tile on Hopper, not one for each",
        "1",
    ),
    Setting(
        "WARPLOOM_TRACE",
        "1 builds attention kernels that tell when each work item ran; slower",
        "0",
    ),
    Setting(
        "WARPLOOM_LOG",
        "debug, info, warning or error: writes what warploom does to stderr",
        "unset",
    ),
    Setting("WARPLOOM_THREADS", "threads of the CPU back end", "torch's"),
    Setting("WARPLOOM_PROGRESS", "0 hides progress bars", "shown on a terminal"),
    Setting(
        "VLLM_WARPLOOM_VARIANT",
        "module:function that chooses the variant of each layer that vLLM serves",
        "unset",
    ),
    Setting("CXX", "C++ compiler of the CPU back end", "c++, g++ or clang++"),
    Setting("CUDA_HOME", "CUDA toolkit to use when there are no CUDA packages", "/usr/local/cuda"),
    Setting("CUDA_PATH", "the same, under its other usual name", "/usr/local/cuda"),
    Setting("CONDA_PREFIX", "environment whose CUDA toolkit is used after those", "unset"),
)

# What compilers read besides their command line, and what would change a kernel behind its key's
# back: more folders to search, more flags, other parts of the compiler, other dates. It is hidden
# from them; what is meant can be said in CXX, whose arguments are part of the key.
HIDDEN = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "OBJC_INCLUDE_PATH",
    "OBJCPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "LD_PRELOAD",  # a sanitizer's library, of which a compiler needs none
    "LD_RUN_PATH",
    "LDEMULATION",
    "DEPENDENCIES_OUTPUT",
    "SUNPRO_DEPENDENCIES",
    "SOURCE_DATE_EPOCH",
    "QA_OVERRIDE_GCC3_OPTIONS",
    "RC_DEBUG_OPTIONS",
)
HIDDEN_PREFIXES = ("GCC_", "CCC_", "CLANG_", "COLLECT_", "NVRTC_", "NVCC_", "NVVM_", "LIBNVVM_",
                   "EDG_")  # fmt: skip

VLLM_VARIANT = "VLLM_WARPLOOM_VARIANT"  # vLLM hands on to its workers what begins with its name

_FLAGS = {**dict.fromkeys(("1", "true", "yes", "on"), True),
          **dict.fromkeys(("", "0", "false", "no", "off"), False)}  # fmt: skip
_FLAG_WORDS = "1, true, yes or on; or else 0, false, no, off or nothing"
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}  # of logging, slow to import


def _flag(name: str, default: bool) -> bool:
    value = os.environ.get(name)
    if value is None:
        return default
    word = value.strip().lower()
    if word not in _FLAGS:
        raise BadSetting(name=name, value=value, expected=_FLAG_WORDS)
    return _FLAGS[word]


def _int(name: str, default: int, least: int) -> int:
    value = os.environ.get(name, "").strip()
    try:
        number = int(value) if value else default
    except ValueError:
        number = least - 1
    if number < least:
        raise BadSetting(name=name, value=value, expected=f"a whole number, {least} or more")
    return number


def given(name: str) -> str | None:
    """The value that the user gave, for the command line; nothing else should need it."""
    return os.environ.get(name)


def unknown() -> dict[str, str]:
    """Variables that look like warploom's and are read by nothing: what to say of each."""
    from difflib import get_close_matches  # for mistakes only

    prefix = "WARPLOOM_"  # which makes any two alike, so that only what follows is compared
    known = [s.name.removeprefix(prefix) for s in SETTINGS if s.name.startswith(prefix)]
    given = {name.removeprefix(prefix) for name in os.environ if name.startswith(prefix)}
    near = {name: get_close_matches(name, known, n=1) for name in sorted(given - {*known})}
    hints = {name: f"; did you mean {prefix}{found[0]}?" for name, found in near.items() if found}
    return {prefix + name: "nothing reads it" + hints.get(name, "") for name in near}


def problem(name: str) -> str | None:
    """Why the value that the user gave will be refused when it is needed; None if it will not."""
    try:
        if read := _REFUSING.get(name):
            read()
    except BadSetting as error:
        return f"refused: expected {error.facts['expected']}"
    return None


def cache_dir() -> Path:
    given = os.environ.get("WARPLOOM_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    from platformdirs import user_cache_path  # only here: importing warploom stays light

    return user_cache_path("warploom")


def cache_size_bytes() -> int:
    return _int("WARPLOOM_CACHE_SIZE", 4096, least=0) << 20


def cache_age_seconds() -> float:
    return _int("WARPLOOM_CACHE_AGE", 90, least=0) * 86400.0


def forbid_compile() -> bool:
    return _flag("WARPLOOM_FORBID_COMPILE", False)


def build_jobs() -> int:
    return _int("WARPLOOM_BUILD_JOBS", _cpus(), least=1)


def use_pch() -> bool:
    return _flag("WARPLOOM_PCH", True)


def line_info() -> bool:
    return _flag("WARPLOOM_LINE_INFO", False)


def racecheck() -> bool:
    return _flag("WARPLOOM_RACECHECK", False)


def sanitize() -> bool:
    return _flag("WARPLOOM_SANITIZE", False)


def verify_plans() -> bool:
    return _flag("WARPLOOM_VERIFY_PLANS", False)


def mixed_roles() -> bool:
    return _flag("WARPLOOM_MIXED_ROLES", True)


def trace() -> bool:
    return _flag("WARPLOOM_TRACE", False)


def log_level() -> int | None:
    """The least level that is written to stderr, as `logging` counts them; None: none is."""
    value = os.environ.get("WARPLOOM_LOG", "").strip()
    if value and value.lower() not in _LEVELS:
        raise BadSetting(name="WARPLOOM_LOG", value=value, expected=", ".join(_LEVELS))
    return _LEVELS[value.lower()] if value else None


def cpu_threads(default: int) -> int:
    return _int("WARPLOOM_THREADS", default, least=1)


def show_progress() -> bool | None:
    """True or False if the user decided, None if the terminal decides."""
    return None if "WARPLOOM_PROGRESS" not in os.environ else _flag("WARPLOOM_PROGRESS", True)


def vllm_variant() -> str | None:
    return os.environ.get(VLLM_VARIANT) or None


def cxx() -> str | None:
    return os.environ.get("CXX") or None


def compiler_environment(temporary: str | None = None) -> dict[str, str]:
    """The environment of compilers: this one's, less what changes kernels and is in no key.

    Args:
        temporary: where a compiler shall put its own files.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in HIDDEN and not name.startswith(HIDDEN_PREFIXES)
    }
    return kept if temporary is None else {**kept, "TMPDIR": temporary}


def cuda_roots() -> list[Path]:
    """Folders in which a CUDA toolkit may lie, best first."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")]
    return [Path(root) for root in (*named, "/usr/local/cuda") if root]


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_REFUSING: dict[str, Callable[[], object]] = {
    "WARPLOOM_FORBID_COMPILE": forbid_compile,
    "WARPLOOM_PCH": use_pch,
    "WARPLOOM_LINE_INFO": line_info,
    "WARPLOOM_RACECHECK": racecheck,
    "WARPLOOM_SANITIZE": sanitize,
    "WARPLOOM_VERIFY_PLANS": verify_plans,
    "WARPLOOM_MIXED_ROLES": mixed_roles,
    "WARPLOOM_TRACE": trace,
    "WARPLOOM_PROGRESS": show_progress,
    "WARPLOOM_CACHE_SIZE": cache_size_bytes,
    "WARPLOOM_CACHE_AGE": cache_age_seconds,
    "WARPLOOM_BUILD_JOBS": build_jobs,
    "WARPLOOM_LOG": log_level,
    "WARPLOOM_THREADS": lambda: cpu_threads(1),
}
