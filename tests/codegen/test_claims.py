"""Drafts belong to processes that live; all others are swept, by whoever comes, at any time."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from warploom.codegen import build
from warploom.codegen.cache import claims
from warploom.codegen.cache.claims import aside, sweep
from warploom.codegen.cache.folder import Folder, Untrusted
from warploom.codegen.cache.store import Store
from warploom.errors import CacheWarning


def test_one_process_builds_under_a_name(tmp_path: Path) -> None:
    with Folder.at(tmp_path) as folder:
        draft = aside(folder, "image")
        assert draft is not None and aside(folder, "image") is None
        sweep(folder)
        assert (tmp_path / draft.name).is_dir()
        draft.close()
        again = aside(folder, "image")
        assert again is not None
        again.close()
    assert list(tmp_path.iterdir()) == []


RACE = """
import sys, time
from pathlib import Path
from warploom.codegen.cache.claims import aside, sweep
from warploom.codegen.cache.folder import Folder
end = time.time() + float(sys.argv[2])
made = 0
with Folder.at(Path(sys.argv[1])) as folder:
    while time.time() < end:
        draft = aside(folder)
        assert draft is not None
        draft.folder.write("file", b"mine")
        sweep(folder)
        assert draft.folder.read("file") == b"mine"
        folder.move(draft.name, folder, f"{draft.name[1:]}")
        draft.close()
        made += 1
print(made)
"""


def test_sweepers_take_nothing_from_builders(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path), "2"], cwd="/", stdout=subprocess.PIPE
        )
        for _ in range(4)
    ]
    made = sum(int(racer.communicate()[0]) for racer in racers)
    assert [racer.returncode for racer in racers] == [0] * 4
    left = list(tmp_path.iterdir())
    assert len(left) == made > 20 and all((folder / "file").exists() for folder in left)


def test_where_there_are_no_locks_age_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(claims.fcntl, "flock", refuse)
    with Folder.at(tmp_path) as folder:
        draft = aside(folder, "image")
        assert draft is not None and aside(folder, "image") is None
        lock = tmp_path / f"{draft.name}.lock"
        long_ago = time.time() - 2 * 3600
        os.utime(lock, (long_ago, long_ago))
        sweep(folder)
        assert list(tmp_path.iterdir()) == []
        draft.close()


def test_drafts_of_other_users_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".draft-1").mkdir()
    (tmp_path / ".draft-1.lock").touch()
    owner = os.geteuid()
    with Folder.open(tmp_path) as folder:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        sweep(folder)
        assert len(list(tmp_path.iterdir())) == 2
        monkeypatch.undo()
        sweep(folder)
    assert list(tmp_path.iterdir()) == []


class MappingOs:
    """The module `os` on a file system whose files belong to somebody else, whoever makes them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fstat(self, fd: int) -> os.stat_result:
        found = list(os.fstat(fd))
        found[stat.ST_UID] += 1
        return os.stat_result(found)


def test_file_systems_that_map_owners_are_refused_and_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".draft-old").mkdir()  # whose lock is gone
    monkeypatch.setattr(claims, "os", MappingOs())
    text = re.escape(f"makes in {tmp_path} belongs to user {os.geteuid() + 1}, as on network")
    with Folder.at(tmp_path) as folder:
        descriptors = len(os.listdir("/proc/self/fd"))
        for name in ("", "image"):
            with pytest.raises(Untrusted, match=text):
                aside(folder, name)
        sweep(folder)
        assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [path.name for path in tmp_path.iterdir()] == [".draft-old"]


def test_builds_on_such_a_file_system_say_where_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(root))
    made: list[Store] = []

    def write(store: Store) -> None:
        made.append(store)
        if store.root == root:
            monkeypatch.setattr(claims, "os", MappingOs())
        try:
            store.keep_failed(key, "kernel.cu", b"text")
        finally:
            monkeypatch.setattr(claims, "os", os)

    key: Any = SimpleNamespace(folder="kernel-0")
    text = f"the cache in {root} is not used: .*network mounts.* Set WARPLOOM_CACHE_DIR"
    with pytest.warns(CacheWarning, match=text):
        build._write(write)
    assert len(made) == 2 and made[1].root != root  # the second keeps it for this process
    assert list((root / "failed").iterdir()) == []
