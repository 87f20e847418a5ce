"""Shared libraries of compiled kernels, loaded from the folder in which they were checked."""

from __future__ import annotations

import ctypes
import os

from warploom.codegen.build import Artifact
from warploom.codegen.cache.folder import Folder, Untrusted

# The linker knows libraries by the path that it was given, so the number in it must never come to
# mean another folder: descriptors stay open, one for each folder of kernels, by device and inode.
_kept: dict[tuple[int, int], Folder] = {}


def load_library(artifact: Artifact) -> ctypes.CDLL:
    """The library of a kernel for the host.

    Raises:
        OSError: it is gone, it is not what was built, or the system refuses to load it.
    """
    kernels = _keep(Folder.at(artifact.path.parent.parent))
    name, file = artifact.path.parent.name, artifact.path.name
    with kernels.folder(name) as entry:
        if entry.read(file) != artifact.content:
            raise Untrusted(f"{artifact.path} was changed since it was checked")
    # Below `kernels` only its owner can put another file in this place; above, anybody may rename.
    return ctypes.CDLL(os.path.join(kernels.place, name, file))


def _keep(folder: Folder) -> Folder:
    found = os.fstat(folder.fd)
    kept = _kept.setdefault((found.st_dev, found.st_ino), folder)
    if kept is not folder:
        folder.close()
    return kept
