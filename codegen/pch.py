"""Precompiled CUDA headers on disk: one file per compiler, header digest, flags and includes.

Parsing CuTe costs seconds, reading its image back a third of one. The image is made as a by-product
of the first kernel; kernels that begin with the same directives share it, also between processes.
It is never needed: every failure here ends in an ordinary compile.

What a template must do to share the file: begin with comments and preprocessor directives only,
with the same `#include` lines in the same order as the other templates. All that differs between
kernels (constants, `#define`s, further includes) goes below `#pragma nv_hdrstop` or the first code.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from warploom import env
from warploom.codegen.nvrtc_worker import PchMode, PchResult

_NEEDED_BYTES = (
    2 << 30
)  # free disk and cache limit below which no image is made (one takes ~300 MiB)
_KEPT = 6
_STALE_SECONDS = 600.0

_log = logging.getLogger(__name__)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


@dataclass(frozen=True)
class Pch:
    """An image to read or to make, or neither."""

    mode: PchMode
    path: Path
    final: Path

    def finish(self, result: PchResult) -> None:
        """Publishes a new image, or throws away one that NVRTC refused."""
        try:
            if result == "created":
                self.path.replace(self.final)
                _prune(self.final.parent)
            elif result == "failed":  # an empty file says: tried, does not work here
                self.final.touch()
            elif result == "rejected":
                self.final.unlink(missing_ok=True)
        except OSError as error:  # disk full or taken away: the next compile makes the image
            _log.debug("precompiled header %s: %s", self.final, error)
        finally:
            if self.mode == "create":
                for path in (self.path, _claim(self.final)):
                    with suppress(OSError):
                        path.unlink(missing_ok=True)


_OFF = Pch("off", Path(), Path())


def choose(folder: Path | None, text: str, parts: tuple[str, ...]) -> Pch:
    """The image that serves this source, or the request to make it, or none.

    Args:
        folder: where images are kept; None turns them off.
        text: the source to compile.
        parts: flags, include folders, versions: everything else the image depends on.
    """
    directives = leading_directives(text)
    if folder is None or not any("include" in directive for directive in directives):
        return _OFF
    key = "\0".join((*parts, *directives))
    final = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.pch"
    try:
        if final.exists():
            os.utime(final)
            return Pch("use", final, final) if final.stat().st_size else _OFF
        folder.mkdir(parents=True, exist_ok=True)
        if min(shutil.disk_usage(folder).free, env.cache_size_bytes()) < _NEEDED_BYTES:
            return _OFF
        if not _take_claim(_claim(final)):
            return _OFF
        return Pch("create", final.with_suffix(f".{os.getpid()}.tmp"), final)
    except OSError:  # read-only folder
        return _OFF


def leading_directives(text: str) -> list[str]:
    """The preprocessor directives before the first line of code."""
    directives = []
    for line in _COMMENT.sub("", text).splitlines():
        directive = " ".join(line.split())
        if directive == "#pragma nv_hdrstop" or (directive and not directive.startswith("#")):
            break
        if directive:
            directives.append(directive)
    return directives


def _claim(final: Path) -> Path:
    return final.with_suffix(".claim")


def _take_claim(claim: Path) -> bool:
    """One process makes the image; the others compile without it meanwhile, and nobody waits."""
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        if time.time() - claim.stat().st_mtime > _STALE_SECONDS:  # its process died
            claim.unlink(missing_ok=True)
        return False
    return True


def _prune(folder: Path) -> None:
    images = sorted(folder.glob("*.pch"), key=lambda path: path.stat().st_mtime, reverse=True)
    leftovers = [
        path
        for path in (*folder.glob("*.tmp"), *folder.glob("*.claim"))
        if time.time() - path.stat().st_mtime > _STALE_SECONDS
    ]
    for path in (*images[_KEPT:], *leftovers):
        path.unlink(missing_ok=True)
