"""Looking after the cache: list, check and clear it, and hold it to its limits of size and age."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from warploom import env
from warploom.codegen.cache import claims
from warploom.codegen.cache.folder import Folder
from warploom.codegen.cache.store import KEY_FILE, DamagedEntry, Store, read_in

_DAY = 86400.0
_STAMP = ".swept"
_ENTRY_NAME = re.compile(r".+-[0-9a-f]{24}")
_IMAGE_NAME = re.compile(r"[0-9a-f]+\.pch")
_NAMES = {"kernels": _ENTRY_NAME, "failed": _ENTRY_NAME, "pch": _IMAGE_NAME}


@dataclass(frozen=True)
class Item:
    """Something that takes room in the cache.

    Attributes:
        path: folder of a kernel or of a failed source, or a precompiled header.
        size: bytes.
        used: when it was last used, in seconds since 1970.
    """

    path: Path
    size: int
    used: float

    def remove(self) -> None:
        """Remove it, if nobody did yet and it can be."""
        with suppress(OSError), Folder.at(self.path.parent) as parent:
            claims.discard(parent, self.path.name)


@dataclass(frozen=True)
class Listed:
    """One kernel of `warploom cache list`; `problem` names a damaged file."""

    item: Item
    facts: dict[str, Any]
    problem: str | None


def kernels(store: Store) -> list[Listed]:
    """All kernels, each one checked, last used first.

    Raises:
        Untrusted: others may write in the cache.
    """
    listed = []
    for folder, item in _items(store, "kernels"):
        try:
            facts = read_in(folder, item.path.name).facts
            listed.append(Listed(item, dict(facts), None))
        except DamagedEntry as problem:
            listed.append(Listed(item, {}, str(problem)))
    return sorted(listed, key=lambda kernel: -kernel.item.used)


def items(store: Store) -> list[Item]:
    """Everything that the limits count; nothing else in the folder is ever touched.

    Raises:
        Untrusted: others may write in the cache.
    """
    return [item for name in _NAMES for _, item in _items(store, name)]


def clear(store: Store) -> tuple[int, int]:
    """Removes everything of ours but what is being built; (how many items, how many bytes).

    Raises:
        Untrusted: others may write in the cache.
    """
    found = items(store)
    for item in found:
        item.remove()
    _sweep_drafts(store)
    return len(found), sum(item.size for item in found)


def sweep(store: Store, *, max_bytes: int, max_age: float) -> list[Item]:
    """Removes what is too old, then what was used longest ago until the rest fits.

    Args:
        store: the cache.
        max_bytes: limit of all items together.
        max_age: seconds since the last use.

    Returns:
        What was removed.
    """
    now = time.time()
    _sweep_drafts(store)
    removed = []
    room = max_bytes
    for item in sorted(items(store), key=lambda item: -item.used):
        room -= item.size
        if room < 0 or now - item.used > max_age:
            room += item.size
            item.remove()
            removed.append(item)
    return removed


def sweep_daily(store: Store) -> None:
    """Sweeps with the limits of the settings, at most once a day and once in this process.

    Raises:
        BadSetting: a limit that is no number, also where no sweep is due.
    """
    _sweep_once(store.root, env.cache_size_bytes(), env.cache_age_seconds())


@lru_cache
def _sweep_once(root: Path, max_bytes: int, max_age: float) -> None:
    with suppress(OSError), Folder.at(root) as folder:  # read-only, or full: another day
        try:
            due = time.time() - folder.check_file(_STAMP).st_mtime > _DAY
        except OSError:
            folder.remove(_STAMP)  # what is no file of ours
            folder.write(_STAMP, b"")
            due = True
        if due:
            folder.touch(_STAMP)
            sweep(Store(root), max_bytes=max_bytes, max_age=max_age)


def _sweep_drafts(store: Store) -> None:
    """Removes what builds have left behind when they died."""
    for name in _NAMES:
        with suppress(FileNotFoundError), store.open(name) as folder:
            claims.sweep(folder)


def _items(store: Store, part: str) -> Iterator[tuple[Folder, Item]]:
    """Each with the folder it lies in, which is open meanwhile."""
    try:
        folder = store.open(part)
    except FileNotFoundError:
        return
    with folder:
        for name in folder.names():
            if _NAMES[part].fullmatch(name):
                with suppress(FileNotFoundError):  # removed by another process meanwhile
                    yield folder, _measure(folder, name)


def _measure(folder: Folder, name: str) -> Item:
    found = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
    size, used = found.st_size, found.st_mtime
    if stat.S_ISDIR(found.st_mode):
        size = 0
        with suppress(OSError), folder.folder(name) as inner:  # or it is damaged
            for file in inner.names():
                about = os.stat(file, dir_fd=inner.fd, follow_symlinks=False)
                size += about.st_size
                if file == KEY_FILE:
                    used = about.st_mtime
    return Item(folder.path / name, size, used)
