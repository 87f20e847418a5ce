"""Looking after the cache: list, check and clear it, and hold it to its limits of size and age."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from warploom import env
from warploom.codegen.store import DRAFT, KEY_FILE, DamagedEntry, Store, read_entry

_DAY = 86400.0
_DRAFT_SECONDS = 3600.0  # no compile takes that long: its process died
_STAMP = ".swept"
_ENTRY_NAME = re.compile(r".+-[0-9a-f]{24}")


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
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Listed:
    """One kernel of `warploom cache list`; `problem` names a damaged file."""

    item: Item
    facts: dict[str, Any]
    problem: str | None


def kernels(store: Store) -> list[Listed]:
    """All kernels, each one checked, last used first."""
    listed = []
    for item in _folders(store.kernels):
        try:
            listed.append(Listed(item, dict(read_entry(item.path).facts), None))
        except DamagedEntry as problem:
            listed.append(Listed(item, {}, str(problem)))
    return sorted(listed, key=lambda kernel: -kernel.item.used)


def items(store: Store) -> list[Item]:
    """Everything that the limits count; nothing else in the folder is ever touched."""
    images = [_measure(path, path) for path in _glob(store.root / "pch", "*.pch")]
    return [*_folders(store.kernels), *_folders(store.failed), *images]


def clear(store: Store) -> tuple[int, int]:
    """Removes everything of ours; (how many items, how many bytes)."""
    found = items(store)
    for item in found:
        item.remove()
    for draft in _drafts(store):
        draft.remove()
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
    for draft in _drafts(store):
        if now - draft.used > _DRAFT_SECONDS:
            draft.remove()
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
    stamp = root / _STAMP
    with suppress(OSError):  # read-only or full: another process, or another day
        if time.time() - _modified(stamp) > _DAY:
            stamp.touch()
            sweep(Store(root), max_bytes=max_bytes, max_age=max_age)


def _drafts(store: Store) -> list[Item]:
    """What builds are writing, or have left behind when they died."""
    paths = _glob(store.kernels, f"{DRAFT}*")
    paths += _glob(store.root / "pch", "*.tmp") + _glob(store.root / "pch", "*.claim")
    return [_measure(path, path) for path in paths]


def _folders(parent: Path) -> Iterator[Item]:
    for folder in _glob(parent, "*"):
        if _ENTRY_NAME.fullmatch(folder.name) and folder.is_dir():
            yield _measure(folder, folder / KEY_FILE if (folder / KEY_FILE).exists() else folder)


def _measure(path: Path, used: Path) -> Item:
    files = [path] if path.is_file() else list(_glob(path, "*"))
    return Item(path, sum(_size(file) for file in files), _modified(used))


def _glob(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern)) if folder.is_dir() else []


def _or_zero(read: Callable[[], float]) -> float:
    try:
        return read()
    except OSError:  # removed by another process meanwhile
        return 0.0


def _size(path: Path) -> int:
    return int(_or_zero(lambda: path.stat().st_size))


def _modified(path: Path) -> float:
    return _or_zero(lambda: path.stat().st_mtime)
