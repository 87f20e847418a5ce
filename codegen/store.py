"""Compiled kernels on disk: one folder per kernel, built aside and renamed whole.

    <cache>/kernels/<name>-<digest>/kernel.cu (or .cpp), kernel.cubin (or .so), key.json
    <cache>/failed/<name>-<digest>/kernel.cu    sources that did not compile
    <cache>/pch/                                see pch.py

Nothing is ever locked. Renaming a folder is atomic, and of two processes that build the same kernel
the second one throws its own work away. `key.json` holds the binary's checksum, so that a damaged
entry is noticed and built again.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from warploom.codegen.key import CacheKey
from warploom.errors import CacheWarning

KEY_FILE = "key.json"
DRAFT = ".draft-"
_TOUCH_SECONDS = 3600.0  # how exact "last used" is; less would write on every load


@dataclass(frozen=True)
class Entry:
    """A complete entry: its folder, and what `key.json` tells."""

    folder: Path
    facts: Mapping[str, Any]

    @property
    def binary(self) -> Path:
        return self.folder / str(self.facts["binary"])

    @property
    def source(self) -> Path:
        return self.folder / str(self.facts["source_file"])


@dataclass(frozen=True)
class Draft:
    """The files of an entry to be saved.

    Attributes:
        source: name and content of the source file.
        binary: name and content of the compiled file.
        facts: what else `key.json` shall tell.
    """

    source: tuple[str, bytes]
    binary: tuple[str, bytes]
    facts: Mapping[str, Any]


class DamagedEntry(Exception):
    """A file of an entry is missing, cut off or changed; names the file."""


class Store:
    """The kernels under one cache folder, which is made when first written to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kernels = root / "kernels"
        self.failed = root / "failed"

    def load(self, key: CacheKey) -> Entry | None:
        """The entry of this key, or None. A damaged one is removed with a CacheWarning."""
        folder = self.kernels / key.folder
        if not folder.is_dir():  # asked first: an entry may come into place at any moment
            return None
        try:
            entry = read_entry(folder, key.digest)
        except DamagedEntry as problem:
            if not folder.is_dir():  # removed by another process just now
                return None
            warnings.warn(f"{problem}; the kernel is built again", CacheWarning, stacklevel=2)
            shutil.rmtree(folder, ignore_errors=True)
            return None
        _touch(folder / KEY_FILE)
        return entry

    def save(self, key: CacheKey, draft: Draft) -> Entry:
        """Writes an entry, or takes the one that another process wrote meanwhile.

        Raises:
            OSError: the folder cannot be written.
        """
        (source_name, source), (binary_name, binary) = draft.source, draft.binary
        facts = {
            "name": key.name,
            "digest": key.digest,
            "binary": binary_name,
            "source_file": source_name,
            "sha256": hashlib.sha256(binary).hexdigest(),
            "bytes": len(source) + len(binary),
            "created": time.time(),
            **draft.facts,
            "parts": key.facts(),
        }
        files = {
            source_name: source,
            binary_name: binary,
            KEY_FILE: json.dumps(facts, indent=2).encode(),
        }
        folder = self.kernels / key.folder
        try:
            _publish(folder, files)
        except FileExistsError:
            entry = self.load(key)
            if entry is not None:
                return entry
            _publish(folder, files)  # the one in the way was damaged, and load() removed it
        return Entry(folder, facts)

    def keep_failed(self, key: CacheKey, name: str, source: bytes) -> Path:
        """Keeps a source that did not compile, for the user to look at; its path."""
        path = self.failed / key.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source)
        return path


@lru_cache(maxsize=1)
def spare_store() -> Store:
    """A private folder of this process, for when the cache cannot be written; removed at exit."""
    root = Path(tempfile.mkdtemp(prefix="warploom-"))  # mode 700: nobody else can plant a binary
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Store(root)


def read_entry(folder: Path, digest: str | None = None) -> Entry:
    """Reads and checks the entry in a folder.

    Args:
        folder: the entry's folder.
        digest: the key it must belong to; None takes any.

    Raises:
        DamagedEntry: a file is missing, cut off or changed.
    """
    path = folder / KEY_FILE
    try:
        facts = json.loads(path.read_bytes())
        entry = Entry(folder, facts)
        if digest is not None and facts["digest"] != digest:
            raise DamagedEntry(f"{path} belongs to another kernel")
        path = entry.binary
        intact = hashlib.sha256(path.read_bytes()).hexdigest() == facts["sha256"]
        path = path if not intact else entry.source
        intact = intact and path.is_file()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedEntry(f"cache file {path} cannot be read ({error})") from error
    if not intact:
        raise DamagedEntry(f"cache file {path} is cut off, changed or missing")
    return entry


def _publish(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files into a new folder and renames it to its place.

    Raises:
        FileExistsError: the place is taken.
        OSError: it cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=DRAFT, dir=folder.parent))
    try:
        for name, content in files.items():
            (aside / name).write_bytes(content)
        aside.chmod(0o755)
        try:
            aside.rename(folder)
        except OSError as error:
            if folder.exists():
                raise FileExistsError(error.errno, error.strerror, str(folder)) from error
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _touch(path: Path) -> None:
    """Marks an entry as used, for the limits of the cache."""
    with suppress(OSError):  # a read-only cache has no order of use
        if time.time() - path.stat().st_mtime > _TOUCH_SECONDS:
            os.utime(path)
