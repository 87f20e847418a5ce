"""Compiled kernels on disk: one folder per kernel, built aside and renamed whole.

    <cache>/kernels/<name>-<digest>/kernel.cu (or .cpp), kernel.cubin (or .so), key.json
    <cache>/failed/<name>-<digest>/kernel.cu    sources that did not compile
    <cache>/pch/                                see pch.py

What lies there will run, so it is taken only from folders and files in which nobody but their
owner, the user or root, can write (folder.py). Nothing is ever waited for. Renaming a folder is
atomic, and of two processes that build the same kernel the second one throws its own work away.
`key.json` holds the checksums of the others and its own, so that a damaged entry is noticed and
built again.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from warploom import forks
from warploom.codegen.cache import claims
from warploom.codegen.cache.claims import DRAFT as DRAFT
from warploom.codegen.cache.claims import Aside, aside
from warploom.codegen.cache.facts import SOURCE_OF, sealed, unsealed
from warploom.codegen.cache.folder import FOLDER_MODE, PRIVATE_MODE, Folder, Untrusted
from warploom.codegen.cache.key import CacheKey
from warploom.deployment_errors import NowhereToWrite
from warploom.errors import CacheWarning

KEY_FILE = "key.json"
_TOUCH_SECONDS = 3600.0  # how exact "last used" is; less would write on every load


@dataclass(frozen=True)
class Entry:
    """A complete entry.

    Attributes:
        folder: where it lies.
        facts: what `key.json` tells.
        content: the binary, as it was checked.
    """

    folder: Path
    facts: Mapping[str, Any]
    content: bytes = field(default=b"", repr=False)

    @property
    def binary(self) -> Path:
        return self.folder / str(self.facts["binary"])

    @property
    def source(self) -> Path:
        return self.folder / SOURCE_OF[self.facts["binary"]]


@dataclass(frozen=True)
class Draft:
    """The files of an entry to be saved.

    Attributes:
        source: name and content of the source file.
        binary: name and content of the compiled file; names are those of `SOURCE_OF`.
        facts: what else `key.json` shall tell.
    """

    source: tuple[str, bytes]
    binary: tuple[str, bytes]
    facts: Mapping[str, Any]


class DamagedEntry(Exception):
    """A file of an entry is missing, cut off or changed, or others may write it; names the file."""


class Store:
    """The kernels under one cache folder, which is made when first written to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kernels = root / "kernels"
        self.failed = root / "failed"

    def open(self, name: str, make: bool = False) -> Folder:
        """One of the cache's folders, to be closed.

        Args:
            name: `kernels`, `failed` or `pch`.
            make: whether it is made where it is missing.

        Raises:
            Untrusted: somebody else could have written in it, or in the cache.
            OSError: it cannot be opened, or made.
        """
        with Folder.at(self.root, make) as root:
            return root.folder(name, make=FOLDER_MODE if make else 0)

    def load(self, key: CacheKey) -> Entry | None:
        """The entry of this key, or None. A damaged one is removed with a CacheWarning.

        A cache that somebody else could have written in has none, and a CacheWarning says so.
        """
        try:
            kernels = self.open("kernels")
        except Untrusted as problem:
            warn_refused(self.root, str(problem))
            return None
        except OSError:  # there is none yet, or it cannot be read, and then not written
            return None
        with kernels:
            return _load(kernels, key)

    def save(self, key: CacheKey, draft: Draft) -> Entry:
        """Writes an entry, or takes the one that another process wrote meanwhile.

        Raises:
            OSError: the folder cannot be written.
            ValueError: a fact of the draft, or a name, is none that `key.json` may tell.
        """
        (source_name, source), (binary_name, binary) = draft.source, draft.binary
        if SOURCE_OF.get(binary_name) != source_name:
            raise ValueError(f"an entry holds no {binary_name} with a {source_name}")
        facts = {
            **draft.facts,
            "name": key.name,
            "digest": key.digest,
            "binary": binary_name,
            "sha256": _sha256(binary),
            "source_sha256": _sha256(source),
            "bytes": len(source) + len(binary),
            "created": time.time(),
            "parts": key.facts(),
        }
        files = {source_name: source, binary_name: binary, KEY_FILE: sealed(facts)}
        with self.open("kernels", make=True) as kernels:
            claims.sweep(kernels)
            try:
                _publish(kernels, key.folder, files)
            except FileExistsError:
                entry = _load(kernels, key)
                if entry is not None:
                    return entry
                _publish(kernels, key.folder, files)  # a damaged one was in the way, and is gone
        return Entry(self.kernels / key.folder, facts, binary)

    def keep_failed(self, key: CacheKey, name: str, source: bytes) -> Path:
        """Keeps a source that did not compile, for the user to look at; its path."""
        with self.open("failed", make=True) as failed:
            claims.sweep(failed)
            try:
                _publish(failed, key.folder, {name: source})
            except FileExistsError:
                claims.discard(failed, key.folder)
                _publish(failed, key.folder, {name: source})
        return self.failed / key.folder / name

    def workshop(self) -> Workshop:
        """A folder to compile in, removed when it is closed, or by others if this process dies.

        Raises:
            OSError: it cannot be made.
        """
        return Workshop(self.open("kernels", make=True))


class Workshop:
    """A folder among the kernels for what compilers write.

    Attributes:
        place: a path to it, for compilers that this process starts.
    """

    def __init__(self, kernels: Folder) -> None:
        """Take over the folder of the kernels."""
        self._kernels = kernels
        try:
            claims.sweep(kernels)
            self._aside = _new_aside(kernels)
        except BaseException:
            kernels.close()
            raise
        self.folder = self._aside.folder
        self.place = self.folder.place

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        self._aside.close()
        self._kernels.close()


@lru_cache(maxsize=1)
def spare_store() -> Store:
    """A private folder of this process, for when the cache cannot be used.

    It is removed at exit, or, if the process was killed, by the next one that makes or seeks one.

    Raises:
        OSError: the folder of temporary files cannot be written.
    """
    parent = Folder.open(Path(tempfile.gettempdir()))
    claims.sweep(parent, _spare_prefix())
    made = _new_aside(parent, prefix=_spare_prefix(), mode=PRIVATE_MODE)
    atexit.register(_close_spare, made, os.getpid())
    return Store(parent.path / made.name)


@contextmanager
def last_resort(root: Path) -> Iterator[Store]:
    """`spare_store`, for what could not be written to the cache at `root`.

    Raises:
        NowhereToWrite: nor can it be written there.
    """
    try:
        yield spare_store()
    except OSError as error:
        raise NowhereToWrite(root=root, reason=error.strerror or error) from error


def sweep_spare() -> None:
    """Remove the private folders of processes that were killed."""
    with suppress(OSError), Folder.open(Path(tempfile.gettempdir())) as parent:
        claims.sweep(parent, _spare_prefix())


def _spare_prefix() -> str:
    return f"warploom-{os.geteuid()}-"


def _close_spare(made: Aside, pid: int) -> None:
    if os.getpid() == pid:  # a forked process leaves it to the one that made it
        made.close()


forks.after(spare_store.cache_clear)  # a forked process makes its own


def read_entry(folder: Path, digest: str | None = None) -> Entry:
    """Reads and checks the entry in a folder.

    Args:
        folder: the entry's folder.
        digest: the key it must belong to; None takes any.

    Raises:
        DamagedEntry: a file is missing, cut off or changed, or others may write it.
    """
    try:
        with Folder.at(folder.parent) as parent:
            return read_in(parent, folder.name, digest)
    except OSError as error:
        raise DamagedEntry(f"cache file {folder} cannot be read ({error})") from error


def read_in(parent: Folder, name: str, digest: str | None = None) -> Entry:
    """`read_entry` in a folder that is open."""
    path = parent.path / name
    try:
        with parent.folder(name) as folder:
            path /= KEY_FILE
            facts = unsealed(folder.read(KEY_FILE))
            if digest is not None and facts["digest"] != digest:
                raise DamagedEntry(f"{path} belongs to another kernel")
            binary = facts["binary"]
            path = path.with_name(binary)
            content = folder.read(binary)
            if _sha256(content) == facts["sha256"]:
                path = path.with_name(SOURCE_OF[binary])
                if _sha256(folder.read(path.name)) == facts["source_sha256"]:
                    return Entry(path.parent, facts, content)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedEntry(f"cache file {path} cannot be read ({error})") from error
    raise DamagedEntry(f"cache file {path} is cut off, changed or missing")


def _load(kernels: Folder, key: CacheKey) -> Entry | None:
    name = key.folder
    if not _is_there(kernels, name):  # asked first: an entry may come into place at any moment
        return None
    try:
        entry = read_in(kernels, name, key.digest)
    except DamagedEntry as problem:
        if not _is_there(kernels, name):  # removed by another process just now
            return None
        warnings.warn(f"{problem}; the kernel is built again", CacheWarning, stacklevel=3)
        with suppress(OSError):  # what stays is in the way of saving, which says so
            claims.discard(kernels, name)
        return None
    _touch(kernels, name)
    return entry


def _is_there(folder: Folder, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
    except OSError:
        return False
    return True


def _publish(parent: Folder, name: str, files: Mapping[str, bytes]) -> None:
    """Writes the files into a new folder and renames it to its place.

    Raises:
        FileExistsError: the place is taken.
        OSError: it cannot be written.
    """
    with _new_aside(parent) as made:
        for file, content in files.items():
            made.folder.write(file, content)
        try:
            parent.move(made.name, parent, name)
        except OSError as error:
            if _is_there(parent, name):
                raise FileExistsError(error.errno, error.strerror, name) from error
            raise


def _new_aside(parent: Folder, prefix: str = DRAFT, mode: int = FOLDER_MODE) -> Aside:
    while True:
        if made := aside(parent, prefix=prefix, mode=mode):
            return made


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@lru_cache
def warn_refused(root: Path, reason: str) -> None:
    """Says why a cache is not used; once per folder and reason."""
    warnings.warn(
        f"the cache in {root} is not used: {reason}. What is compiled there runs, so only its "
        "owner may write in it. Set WARPLOOM_CACHE_DIR to a folder of your own.",
        CacheWarning,
        stacklevel=3,
    )


def _touch(kernels: Folder, name: str) -> None:
    """Marks an entry as used, for the limits of the cache."""
    with suppress(OSError), kernels.folder(name) as folder:  # read-only: no order of use
        if time.time() - folder.check_file(KEY_FILE).st_mtime > _TOUCH_SECONDS:
            folder.touch(KEY_FILE)
