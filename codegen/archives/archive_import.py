"""Archives of kernels brought into the cache: checked wholly first, then entry by entry.

The manifest tells damage, and mistakes of those who move files. It does not tell an attacker, who
can write a manifest as well: an archive is code, and must come from a trusted source. Even so no
name from an archive becomes a path, and nothing unpacks to more than it says and the cache takes.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import warploom
from warploom import env
from warploom.codegen.archives.archive import FACTS, FILES, FORMAT, MANIFEST, digest_of, is_current
from warploom.codegen.cache.key import CacheKey
from warploom.codegen.cache.store import Draft, Store
from warploom.codegen.compilers.cubin import Resources
from warploom.codegen.source import KernelSource
from warploom.deployment_errors import (
    ArchiveTooLarge,
    CacheNotWritable,
    DamagedArchive,
    NewerArchive,
    NoArchive,
    OtherHeaders,
    UnsafeArchive,
    WrongArchive,
)

_LARGEST_MANIFEST = 64 << 20  # bytes; a kernel takes about 2000
_LARGEST_FILE = 256 << 20  # of a kernel; the largest so far have 2 MiB
_UNREADABLE = (
    BadZipFile, zlib.error, EOFError, OSError, ValueError, struct.error, NotImplementedError,
    RecursionError, RuntimeError,
)  # fmt: skip


@dataclass(frozen=True)
class ImportReport:
    """What an archive brought.

    Attributes:
        imported: kernels that the cache did not have.
        present: those that it had.
        bytes: of the sources and binaries that were imported.
    """

    imported: int
    present: int
    bytes: int


def import_kernels(path: str | os.PathLike[str], *, sha256: str | None = None) -> ImportReport:
    """Bring the kernels of an archive into the cache (`WARPLOOM_CACHE_DIR`).

    The whole archive is checked before anything is written. Each kernel is then published whole;
    if writing ends half-way, those that are in the cache are good. An archive is code that will
    run: its manifest guards against damage, `sha256` against another file.

    Args:
        path: a file that `export_kernels` wrote.
        sha256: what its SHA-256 must be, in hexadecimal digits; None takes any.

    Raises:
        NoArchive, DamagedArchive, UnsafeArchive, NewerArchive, OtherHeaders, ArchiveTooLarge,
        WrongArchive: the archive, or a file in it, cannot be taken; nothing was imported.
        CacheNotWritable: the cache is read-only or full.
    """
    place = Path(path)
    try:
        stream = place.open("rb")
    except FileNotFoundError as error:
        raise NoArchive(path=place) from error
    except OSError as error:
        raise DamagedArchive(path=place, reason=f"it cannot be read ({error})") from error
    with stream:  # opened once, so that what is imported is what the digest is of
        if sha256 is not None and (digest := digest_of(stream)) != sha256.strip().lower():
            raise WrongArchive(path=place, got=digest, expected=sha256)
        archive = _Archive(place, _opened(place, stream))
        for kernel in archive.kernels:
            archive.draft(kernel)
        return _publish(archive)


def _opened(path: Path, stream: BinaryIO) -> ZipFile:
    try:
        return ZipFile(stream)
    except _UNREADABLE as error:
        reason = f"it cannot be read, or was cut off ({error})"
        raise DamagedArchive(path=path, reason=reason) from error


@dataclass(frozen=True)
class _Listed:
    """A kernel of the manifest.

    Attributes:
        entry: what the manifest says of it.
        members: its source and its binary.
    """

    entry: Mapping[str, Any]
    members: tuple[ZipInfo, ZipInfo]


class _Archive:
    """An open archive whose list of files is the manifest's.

    Attributes:
        kernels: in the manifest's order.
    """

    def __init__(self, path: Path, file: ZipFile) -> None:
        """Check names, sizes and versions; contents are checked as they are read."""
        self._path, self._file = path, file
        members = self._members()
        if MANIFEST not in members:
            raise self._damaged(f"it has no {MANIFEST}")
        if members[MANIFEST].file_size > _LARGEST_MANIFEST:
            raise UnsafeArchive(path=path, reason=f"{MANIFEST} is too large")
        manifest = self._manifest(members.pop(MANIFEST))
        self.kernels = [self._listed(entry, members) for entry in manifest["kernels"]]
        known = [info.filename for kernel in self.kernels for info in kernel.members]
        if repeated := [name for name, count in Counter(known).items() if count > 1]:
            raise self._damaged(f"{MANIFEST} lists {repeated[0]} twice")
        if unlisted := sorted(members.keys() - set(known)):
            raise UnsafeArchive(
                path=path, reason=f"{unlisted[0]!r}, which {MANIFEST} does not list"
            )
        total = sum(info.file_size for kernel in self.kernels for info in kernel.members)
        if total > env.cache_size_bytes():
            limit = env.cache_size_bytes() >> 20
            raise ArchiveTooLarge(path=path, got=-(-total >> 20), limit=limit)

    def draft(self, kernel: _Listed) -> tuple[CacheKey, Draft]:
        """Read and check a kernel's files; its key, and what to save.

        Raises:
            DamagedArchive: they are not what the manifest says.
            OtherHeaders: this installation would not find it.
        """
        entry = kernel.entry
        source, binary = (self._content(kernel, i) for i in (0, 1))
        try:
            parts, facts = dict(entry["parts"]), dict(entry["facts"])
            language = parts["language"]
            code = KernelSource("", source.decode(), language).code
            key = CacheKey(entry["name"], tuple(sorted({**parts, "source": code}.items())))
            intact = key.facts() == parts and key.digest == entry["digest"]
            intact = intact and key.folder == entry["folder"]
            _check_facts(facts, language)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(f"{MANIFEST} describes no kernel in {entry} ({error})") from error
        if not intact:
            raise self._damaged(f"{kernel.members[0].filename} is not the source of its key")
        if not is_current({"parts": parts, **facts}):
            raise OtherHeaders(
                path=self._path, warploom=facts["warploom"], kernel=entry["name"],
                here=warploom.__version__,
            )  # fmt: skip
        names = FILES[language]
        return key, Draft((names[0], source), (names[1], binary), facts)

    def _members(self) -> dict[str, ZipInfo]:
        found: dict[str, ZipInfo] = {}
        for info in self._file.infolist():
            name, kind = info.filename, stat.S_IFMT(info.external_attr >> 16)
            reason = None
            if name in found:
                reason = "is there twice"
            elif name != info.orig_filename or info.is_dir() or kind not in (0, stat.S_IFREG):
                reason = "is no plain file"
            elif info.file_size > _LARGEST_FILE:
                reason = f"unpacks to {info.file_size >> 20} MiB"
            elif info.flag_bits & 1 or info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                reason = "is packed in another way"
            if reason is not None:
                raise UnsafeArchive(path=self._path, reason=f"{name!r} {reason}")
            found[name] = info
        return found

    def _manifest(self, info: ZipInfo) -> dict[str, Any]:
        try:
            manifest = json.loads(self._read(info))
            version = manifest["format"]
            if not isinstance(version, int) or not isinstance(manifest["kernels"], list):
                raise TypeError("format is no number, or kernels are no list")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._damaged(f"{MANIFEST} cannot be read ({error})") from error
        if version > FORMAT:
            writer = manifest.get("warploom")
            raise NewerArchive(path=self._path, got=version, warploom=writer, known=FORMAT)
        return dict(manifest)

    def _listed(self, entry: Any, members: Mapping[str, ZipInfo]) -> _Listed:
        """The files of a kernel. Their names are ours, in a folder that is the key's own."""
        try:
            names = FILES[entry["parts"]["language"]]
            if [one["name"] for one in entry["files"]] != list(names):
                raise ValueError(f"its files are not {' and '.join(names)}")
            places = [f"kernels/{entry['folder']}/{name}" for name in names]
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"{MANIFEST} describes no kernel in {entry!r} ({error})") from error
        for place, file in zip(places, entry["files"], strict=True):
            if place not in members:
                raise self._damaged(f"{place} is missing")
            if members[place].file_size != file.get("bytes"):
                size = members[place].file_size
                raise self._damaged(f"{place} has {size} bytes, and not {file.get('bytes')}")
        return _Listed(entry, (members[places[0]], members[places[1]]))

    def _content(self, kernel: _Listed, index: int) -> bytes:
        info = kernel.members[index]
        content = self._read(info)
        if hashlib.sha256(content).hexdigest() != kernel.entry["files"][index].get("sha256"):
            raise self._damaged(f"{info.filename} was changed")
        return content

    def _read(self, info: ZipInfo) -> bytes:
        """The file's bytes; no more than it says, whatever it unpacks to."""
        try:
            with self._file.open(info) as file:
                content = file.read(info.file_size + 1)
        except _UNREADABLE as error:
            raise self._damaged(f"{info.filename} cannot be read ({error})") from error
        if len(content) != info.file_size:
            raise self._damaged(f"{info.filename} has not the size that it says")
        return content

    def _damaged(self, reason: str) -> DamagedArchive:
        return DamagedArchive(path=self._path, reason=reason)


def _check_facts(facts: Mapping[str, Any], language: str) -> None:
    """Raise TypeError, KeyError or ValueError for facts that the cache's readers do not expect."""
    if not set(facts) <= set(FACTS) or not isinstance(facts["warploom"], str):
        raise ValueError(f"facts are {sorted(facts)}")
    float(facts["compile_seconds"])
    dict(facts["labels"])
    if language == "cuda":
        Resources(**facts["resources"])
    else:
        host = facts["host"]
        if not all(isinstance(x, str) for name in ("features", "needs") for x in host[name]):
            raise TypeError("host holds no names of instruction sets")


def _publish(archive: _Archive) -> ImportReport:
    store = Store(env.cache_dir())
    imported, present, size = 0, 0, 0
    for kernel in archive.kernels:
        key, draft = archive.draft(kernel)  # read and checked anew: the file may have changed
        if store.load(key) is not None:
            present += 1
            continue
        try:
            store.save(key, draft)
        except OSError as error:
            raise CacheNotWritable(root=store.root, reason=str(error)) from error
        imported += 1
        size += len(draft.source[1]) + len(draft.binary[1])
    return ImportReport(imported, present, size)
