"""The headers of CPU kernels, compiled once for all tests.

Reading them is a third of a kernel's compile time, and tests compile hundreds. That our headers
include what they need themselves is a test of its own (`tests/codegen/test_std_headers.py`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import warploom.templates
from warploom.codegen.compilers.hostcc import host_target
from warploom.errors import NoHostCompiler

TEMPLATES = Path(warploom.templates.__file__).parent
_ATTENTION = ("threads", "roles")  # a kernel includes one of them, and nothing else
# Not optimised, in half of the time. A macro keeps them apart from the others in the cache.
_QUICK = ("-O0", "-DWARPLOOM_TESTED_QUICKLY")
# Memory that a kernel or planner reads before it writes it has absurd values, not 0 by chance.
_PATTERN = "-ftrivial-auto-var-init=pattern"
_OURS = "-fno-code-hoisting"  # a flag of GCC that all kernels have, and other callers have not
# Headers compiled without sanitizers do for no others, which would read the text instead.
_SCRIPT = """#!/bin/sh
header=
text=
case "$*" in
  *-fsanitize=*) ;;
  *{ours}*)
    header="-include {std}"
    for word; do
      case "$word" in *.cpp) text=$word ;; esac
    done
    if grep -Eqs "^#include <warploom/({names})[.]hpp>" "$text"; then
      header="-include {attention}"
    fi ;;
esac
exec {command} $header "$@" {more}
"""


def std_headers() -> list[str]:
    """What the headers of the CPU back end include of others, wherever they do it."""
    files = [file for folder in ("cpu", "common") for file in (TEMPLATES / folder).rglob("*.hpp")]
    lines = (re.findall(r"^#include <([\w/.]+)>", file.read_text(), re.M) for file in sorted(files))
    found = dict.fromkeys(name for names in lines for name in names)
    return [name for name in found if not name.startswith("warploom/")]


def compiler_with_headers(folder: Path, quick: bool) -> str | None:
    """A script that calls GCC with its headers compiled, for CXX; None where another is used.

    A path of one word, since others read CXX too: torch's inductor takes no arguments in it, and
    gets the compiler without headers, which its flags would have read as text.

    Args:
        folder: where they are kept.
        quick: whether kernels are not optimised.
    """
    try:
        target = host_target()
    except NoHostCompiler:
        return None
    if os.environ.get("CXX") or _OURS not in target.flags:
        return None
    more = _quick_flags(target.command) if quick else ()
    command = [*target.command, *target.flags, *more]
    command += [f"-I{TEMPLATES / x}" for x in ("cpu", "common")]
    std, attention = (
        _compiled(text, target.macros, command, folder) for text in (_std_text(), _kernel_text())
    )
    text = _SCRIPT.format(
        ours=_OURS, std=std, attention=attention, names="|".join(_ATTENTION),
        command=shlex.join(target.command), more=shlex.join(more),
    )  # fmt: skip
    script = folder / f"c++-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not script.exists():
        draft = Path(f"{script}.{os.getpid()}")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(script)
    return str(script)


def _quick_flags(command: Sequence[str]) -> tuple[str, ...]:
    asked = [*command, _PATTERN, "-E", "-x", "c++", os.devnull]  # GCC knows it from 12 on
    knows = subprocess.run(asked, capture_output=True).returncode == 0
    return (*_QUICK, _PATTERN) if knows else _QUICK


def _std_text() -> str:
    lines = (f"#if __has_include(<{x}>)\n#include <{x}>\n#endif\n" for x in std_headers())
    return "".join(lines)


def _kernel_text() -> str:
    """All that attention kernels include: others have names of their own that are theirs, too."""
    return _std_text() + "".join(f"#include <warploom/{x}.hpp>\n" for x in _ATTENTION)


def _compiled(text: str, macros: str, command: Sequence[str], folder: Path) -> Path:
    """A header with this text, which has its compiled form beside it."""
    own = (x.read_text() for y in ("cpu", "common") for x in sorted((TEMPLATES / y).rglob("*.hpp")))
    parts = (text, macros, *command, *(own if "<warploom/" in text else ()))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    header = folder / f"std-{digest}.hpp"
    compiled = Path(f"{header}.gch")
    if not compiled.exists():
        folder.mkdir(parents=True, exist_ok=True)
        header.write_text(text)
        draft = Path(f"{compiled}.{os.getpid()}")
        subprocess.run([*command, "-x", "c++-header", str(header), "-o", str(draft)], check=True)
        draft.replace(compiled)
    return header


def plain_command(folder: Path) -> tuple[str, ...]:
    """The compiler, without the script of `compiler_with_headers` in the same folder.

    GCC reads one compiled header at most. Texts that have one of their own would get that of the
    script instead, and read all of theirs: half as much again as their whole compile takes.
    """
    with mock.patch.dict(os.environ):
        if Path(os.environ.get("CXX", "")).parent == folder:
            del os.environ["CXX"]
        return host_target().command


def precompiled(header: Path, command: Sequence[str], folder: Path) -> Path:
    """A folder in which compilers find a header compiled, if it goes before the header's own.

    Args:
        header: which includes nothing but the standard headers and its neighbours.
        command: the compiler, with the flags that it will have.
        folder: where they are kept.
    """
    texts = [file.read_text() for file in sorted(header.parent.glob("*.hpp"))]
    parts = "\0".join([*texts, *command, host_target().macros])
    made = folder / hashlib.sha256(parts.encode()).hexdigest()[:16]
    compiled = made / f"{header.name}.gch"
    if not compiled.exists():
        made.mkdir(parents=True, exist_ok=True)
        draft = Path(f"{compiled}.{os.getpid()}")
        subprocess.run([*command, "-x", "c++-header", str(header), "-o", str(draft)], check=True)
        draft.replace(compiled)
    return made
