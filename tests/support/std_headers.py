"""The standard headers of CPU kernels, compiled once for all tests.

Reading them is a quarter of a kernel's compile time, and tests compile hundreds. That our headers
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


def std_headers() -> list[str]:
    """What the headers of the CPU back end include of others, wherever they do it."""
    files = [file for folder in ("cpu", "common") for file in (TEMPLATES / folder).rglob("*.hpp")]
    lines = (re.findall(r"^#include <([\w/.]+)>", file.read_text(), re.M) for file in sorted(files))
    found = dict.fromkeys(name for names in lines for name in names)
    return [name for name in found if not name.startswith("warploom/")]


def compiler_with_headers(folder: Path, quick: bool) -> str | None:
    """A script that calls GCC with its headers compiled, for CXX; None where another is used.

    A path of one word, since others read CXX too: torch's inductor takes no arguments in it.

    Args:
        folder: where they are kept.
        quick: whether kernels are optimised little, in half of the time. A macro keeps them apart
            from the others in the cache.
    """
    try:
        target = host_target()
    except NoHostCompiler:
        return None
    if os.environ.get("CXX") or "-fno-code-hoisting" not in target.flags:  # which is of GCC
        return None
    more = ("-O1", "-DWARPLOOM_TESTED_QUICKLY") if quick else ()
    text = "".join(f"#if __has_include(<{x}>)\n#include <{x}>\n#endif\n" for x in std_headers())
    parts = (text, target.version, target.macros, *target.flags, *more)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    header = folder / f"std-{digest}.hpp"
    compiled = Path(f"{header}.gch")
    if not compiled.exists():
        folder.mkdir(parents=True, exist_ok=True)
        header.write_text(text)
        draft = Path(f"{compiled}.{os.getpid()}")
        command = [*target.command, *target.flags, *more, "-x", "c++-header", str(header)]
        subprocess.run([*command, "-o", str(draft)], check=True)
        draft.replace(compiled)
    script = folder / f"c++-{digest}"
    if not script.exists():
        draft = Path(f"{script}.{os.getpid()}")
        call = f'{shlex.join(target.command)} $header "$@" {shlex.join(more)}'
        # those compiled without sanitizers do for no others, which would read the text instead
        given = f'case "$*" in *-fsanitize=*) ;; *) header="-include {header}" ;; esac'
        draft.write_text(f"#!/bin/sh\nheader=\n{given}\nexec {call}\n")
        draft.chmod(0o755)
        draft.replace(script)
    return str(script)


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
