"""Archives of kernels taken apart, changed and put together again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

import warploom as wl
from warploom.codegen.cache.store import Store
from warploom.codegen.cache.upkeep import kernels
from warploom.deployment_errors import ArchiveError

Members = dict[str, bytes]


def members(path: Path) -> Members:
    with ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def rewrite(path: Path, content: Members) -> None:
    with ZipFile(path, "w", ZIP_DEFLATED) as file:
        for name, data in content.items():
            file.writestr(name, data)


def change_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = members(path)
    manifest = json.loads(content["manifest.json"])
    change(manifest)
    rewrite(path, content | {"manifest.json": json.dumps(manifest).encode()})


def refused(path: Path, store: Store, error: type[ArchiveError], match: str) -> None:
    """The archive is refused with its name and a remedy, and nothing of it is in the cache."""
    with pytest.raises(error, match=match) as caught:
        wl.import_kernels(path)
    assert str(path) in str(caught.value)
    assert not kernels(store) and not list(store.root.glob("kernels/*"))
