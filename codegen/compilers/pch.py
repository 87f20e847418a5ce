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
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from warploom import env
from warploom.codegen.cache import claims
from warploom.codegen.cache.claims import DRAFT, Aside, aside
from warploom.codegen.cache.folder import FOLDER_MODE, Folder
from warploom.codegen.compilers.nvrtc_worker import PchMode, PchResult

_NEEDED_BYTES = (
    2 << 30
)  # free disk and cache limit below which no image is made (one takes ~300 MiB)
_KEPT = 6
_IMAGE = "image.pch"  # in the draft

_log = logging.getLogger(__name__)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


@dataclass(frozen=True)
class Pch:
    """An image to read or to make, or neither.

    Attributes:
        mode: which.
        path: for NVRTC, until `finish`.
        name: of the image among the others.
        folder: of all images; open until `finish`.
        draft: where one is made.
    """

    mode: PchMode
    path: Path = Path()
    name: str = ""
    folder: Folder | None = None
    draft: Aside | None = None

    def finish(self, result: PchResult) -> None:
        """Publishes a new image, or throws away one that NVRTC refused."""
        if self.folder is None:
            return
        with self.folder as folder:
            try:
                self._settle(folder, result)
            except OSError as error:  # disk full or taken away: the next compile makes the image
                _log.debug("precompiled header %s: %s", folder.path / self.name, error)
            finally:
                if self.draft is not None:
                    self.draft.close()

    def _settle(self, folder: Folder, result: PchResult) -> None:
        if result == "created" and self.draft is not None:
            self.draft.folder.protect(_IMAGE)
            self.draft.folder.move(_IMAGE, folder, self.name)
            _prune(folder)
        elif result == "failed" and self.draft is not None:  # empty: tried, does not work here
            self.draft.folder.write(self.name, b"")
            self.draft.folder.move(self.name, folder, self.name)
        elif result == "rejected":
            folder.remove(self.name)


_OFF = Pch("off")


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
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.pch"
    try:
        with Folder.at(folder.parent, make=True) as cache:
            images = cache.folder(folder.name, make=FOLDER_MODE)
    except OSError:  # read-only, or others may write in it
        return _OFF
    found = _OFF
    try:
        found = _use(images, name) or _make(images, name) or _OFF
    except OSError as error:
        _log.debug("precompiled header %s: %s", folder / name, error)
    finally:
        if found.folder is None:
            images.close()
    return found


def _use(images: Folder, name: str) -> Pch | None:
    """The image if there is one; an empty one says that none works."""
    try:
        size = images.check_file(name).st_size
    except FileNotFoundError:
        return None
    if size == 0:
        return _OFF
    with suppress(OSError):  # read-only: no order of use
        images.touch(name)
    return Pch("use", Path(images.place, name), name, images)


def _make(images: Folder, name: str) -> Pch | None:
    """A draft of the image; one process makes it, the others compile without it meanwhile."""
    claims.sweep(images)
    if min(shutil.disk_usage(images.fd).free, env.cache_size_bytes()) < _NEEDED_BYTES:
        return None
    draft = aside(images, name)
    if draft is None:
        return None
    return Pch("create", Path(draft.folder.place, _IMAGE), name, images, draft)


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


def _prune(folder: Folder) -> None:
    images = [name for name in folder.names() if name.endswith(".pch") and DRAFT not in name]
    used = {name: folder.check_file(name).st_mtime for name in images}
    for name in sorted(images, key=lambda name: -used[name])[_KEPT:]:
        folder.remove(name)
