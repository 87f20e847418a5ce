"""An archive of kernels: what it holds, and how one is made from the cache.

    manifest.json                      format, versions, and for each kernel all of its `key.json`
                                       that another cache needs, with sizes and checksums of files
    kernels/<folder>/kernel.cu         its source (or kernel.cpp)
    kernels/<folder>/kernel.cubin      its binary (or kernel.so)

It is a zip: the directory at its end names every file and its size before any is unpacked, files
are read one at a time, and nothing in it has owners, devices or hard links. Nothing is ever
unpacked to a name from the archive (`archive_import.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import warploom
from warploom import env
from warploom.codegen.cache import upkeep
from warploom.codegen.cache.key import SCHEMA
from warploom.codegen.cache.store import DamagedEntry, Store, read_entry
from warploom.codegen.compilers.headers import header_digest
from warploom.deployment_errors import CannotExport

FORMAT = 1  # raise it when older versions could no longer read what is written
MANIFEST = "manifest.json"
FILES = {"cuda": ("kernel.cu", "kernel.cubin"), "cpp": ("kernel.cpp", "kernel.so")}
# What `key.json` tells that does not follow from the key and the files.
FACTS = ("compile_seconds", "host", "labels", "pch", "resources", "warploom")
_HEADERS = {"cuda": ("include", "common"), "cpp": ("cpu", "common")}
_NO_DATE = (1980, 1, 1, 0, 0, 0)  # the same cache makes the same archive


@dataclass(frozen=True)
class ExportReport:
    """An archive that was written.

    Attributes:
        path: of the file.
        kernels: how many it holds.
        left_out: kernels of other versions of warploom, which no installation of this one finds.
        bytes: size of the file.
        sha256: of the file, in hexadecimal digits; `import_kernels` can ask for it.
    """

    path: Path
    kernels: int
    left_out: int
    bytes: int
    sha256: str


def export_kernels(
    path: str | os.PathLike[str], *, archs: Iterable[str] | None = None
) -> ExportReport:
    """Write the cache's kernels to one file, which `import_kernels` brings into another cache.

    Kernels of other versions of warploom are left out.

    Args:
        path: of the file; an older one is replaced.
        archs: back ends whose kernels are wanted (sm_80, ..., cpu), with the planner of the host,
            which all of them use; all by default.

    Raises:
        CannotExport: a kernel in the cache is damaged, there is none, or none for one of `archs`,
            or the file cannot be written. There is no file then, or still the older one.
    """
    target, wanted = Path(path), None if archs is None else set(archs)
    store = Store(env.cache_dir())
    found = upkeep.kernels(store)
    for one in found:
        if one.problem is not None:
            remedy = "Build it again, or remove it with warploom cache clear."
            raise CannotExport(path=target, reason=one.problem, remedy=remedy)
    asked = [one for one in found if wanted is None or _serves(one.facts, wanted)]
    current = [x for x in asked if is_current(x.facts)]
    missing = (wanted or set()) - {x.facts["parts"]["target"] for x in current}
    if missing or not current:
        of = f" for {', '.join(sorted(missing))}" if missing else ""
        reason = f"the cache in {store.root} holds no kernel{of} of this version of warploom"
        raise CannotExport(path=target, reason=reason, remedy="Fill it with warploom build.")
    folders = sorted(x.item.path for x in current)
    try:
        digest = _write(target, folders)
    except (OSError, DamagedEntry) as error:
        remedy = "Choose a place that can be written and has room."
        raise CannotExport(path=target, reason=str(error), remedy=remedy) from error
    size = target.stat().st_size
    return ExportReport(target, len(folders), len(asked) - len(folders), size, digest)


def is_current(facts: Mapping[str, Any]) -> bool:
    """True for kernels that this installation would find, by their headers and the key's form."""
    parts = _parts(facts)
    language = parts.get("language")
    if language not in FILES or parts.get("schema") != str(SCHEMA):
        return False
    recorded = language == "cuda" or isinstance(facts.get("host"), dict)
    return recorded and parts.get("headers") == header_digest(*_HEADERS[str(language)])


def _serves(facts: Mapping[str, Any], archs: set[str]) -> bool:
    """True for kernels of these back ends, and for the host's planner, which all of them use."""
    labels = facts.get("labels")
    planner = isinstance(labels, dict) and labels.get("kind") == "planner"
    target = _parts(facts).get("target")
    return target in archs or (planner and target == "cpu")


def digest_of(stream: BinaryIO) -> str:
    """SHA-256 of a whole file, in hexadecimal digits."""
    digest = hashlib.sha256()
    stream.seek(0)
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _parts(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = facts.get("parts")
    return parts if isinstance(parts, dict) else {}


def _write(target: Path, folders: Iterable[Path]) -> str:
    """Write the archive beside its place and move it there; its digest."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    aside = Path(name)
    try:
        with os.fdopen(handle, "wb") as file, ZipFile(file, "w", ZIP_DEFLATED) as archive:
            listed = [_add(archive, folder) for folder in folders]
            manifest = {"format": FORMAT, "warploom": warploom.__version__, "kernels": listed}
            text = json.dumps(manifest, indent=1, sort_keys=True)
            archive.writestr(_member(MANIFEST), text.encode())
        aside.chmod(0o644)
        with aside.open("rb") as written:
            digest = digest_of(written)
        aside.replace(target)
    finally:
        with suppress(FileNotFoundError):  # it is in its place
            aside.unlink()
    return digest


def _add(archive: ZipFile, folder: Path) -> dict[str, Any]:
    """Add a kernel's files; returns what the manifest tells of it."""
    entry = read_entry(folder)
    names = FILES[entry.facts["parts"]["language"]]
    files = []
    for name, path in zip(names, (entry.source, entry.binary), strict=True):
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        archive.writestr(_member(f"kernels/{folder.name}/{name}"), content)
        files.append({"name": name, "bytes": len(content), "sha256": digest})
    return {
        "name": entry.facts["name"],
        "folder": folder.name,
        "digest": entry.facts["digest"],
        "parts": entry.facts["parts"],
        "facts": {name: entry.facts[name] for name in FACTS if name in entry.facts},
        "files": files,
    }


def _member(name: str) -> ZipInfo:
    info = ZipInfo(name, _NO_DATE)
    info.compress_type = ZIP_DEFLATED
    info.create_system = 3  # which says how to read the mode that follows
    info.external_attr = (stat.S_IFREG | 0o644) << 16
    return info
