"""The cache on disk: whole entries only, whoever writes them and whatever happens to them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from warploom.codegen.cache.facts import sealed, unsealed
from warploom.codegen.cache.folder import Folder
from warploom.codegen.cache.key import CacheKey
from warploom.codegen.cache.store import DRAFT, Draft, Store
from warploom.errors import CacheWarning

KEY = CacheKey("scale", (("source", "text"), ("target", "sm_80")))
DRAFT_FILES = Draft(
    ("kernel.cu", b"text"), ("kernel.cubin", bytes(range(256)) * 40), {"compile_seconds": 1.5}
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def test_what_was_saved_is_loaded(store: Store) -> None:
    assert store.load(KEY) is None
    saved = store.save(KEY, DRAFT_FILES)
    loaded = store.load(KEY)
    assert loaded is not None and loaded.folder == saved.folder
    assert loaded.binary.read_bytes() == DRAFT_FILES.binary[1]
    assert loaded.source.read_bytes() == b"text"
    assert loaded.facts["compile_seconds"] == 1.5
    assert loaded.facts["parts"]["target"] == "sm_80"
    assert store.load(CacheKey("scale", (("source", "other"),))) is None


def test_an_entry_is_three_files_that_anybody_can_read(store: Store) -> None:
    folder = store.save(KEY, DRAFT_FILES).folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "kernel.cu",
        "kernel.cubin",
        "key.json",
    ]
    assert folder.name.startswith("scale-")
    assert os.stat(folder).st_mode & 0o777 == 0o755


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def rename_key(path: Path) -> None:
    path.write_bytes(sealed({**unsealed(path.read_bytes()), "digest": "0" * 64}))


def change_fact(path: Path) -> None:
    path.write_text(path.read_text().replace("1.5", "2.5"))


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("kernel.cubin", truncate),
        ("kernel.cubin", flip),
        ("kernel.cubin", Path.unlink),
        ("kernel.cubin", lambda path: path.write_bytes(b"")),
        ("kernel.cu", Path.unlink),
        ("key.json", truncate),
        ("key.json", Path.unlink),
        ("key.json", lambda path: path.write_bytes(b"")),
        ("key.json", lambda path: path.write_text("[]")),
        ("key.json", lambda path: path.write_text("{}")),
        ("key.json", lambda path: path.write_text("[" * 100_000)),
        ("key.json", rename_key),
        ("key.json", change_fact),
    ],
)
def test_a_damaged_entry_is_named_and_built_again(
    store: Store, file: str, harm: Callable[[Path], object]
) -> None:
    folder = store.save(KEY, DRAFT_FILES).folder
    harm(folder / file)
    with pytest.warns(CacheWarning, match=file.replace(".", r"\.")):
        assert store.load(KEY) is None
    assert not folder.exists()
    assert store.save(KEY, DRAFT_FILES).binary.read_bytes() == DRAFT_FILES.binary[1]
    assert store.load(KEY) is not None


def test_an_entry_that_cannot_be_renamed_is_removed_nevertheless(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of a container's image cannot be renamed in the containers made of it."""
    folder = store.save(KEY, DRAFT_FILES).folder
    truncate(folder / "kernel.cubin")

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    with monkeypatch.context() as patch, pytest.warns(CacheWarning):
        patch.setattr(Folder, "move", refuse)
        assert store.load(KEY) is None
    assert list(store.kernels.iterdir()) == []


def test_saving_over_a_damaged_entry_replaces_it(store: Store) -> None:
    folder = store.save(KEY, DRAFT_FILES).folder
    truncate(folder / "kernel.cubin")
    with pytest.warns(CacheWarning, match="kernel.cubin"):
        store.save(KEY, DRAFT_FILES)
    assert store.load(KEY) is not None


def test_the_second_of_two_writers_takes_the_first_ones(store: Store) -> None:
    first = store.save(KEY, DRAFT_FILES)
    other = Draft(DRAFT_FILES.source, ("kernel.cubin", b"another compile"), {})
    second = store.save(KEY, other)
    assert second.binary.read_bytes() == first.binary.read_bytes() == DRAFT_FILES.binary[1]
    assert [path.name for path in store.kernels.iterdir()] == [KEY.folder]


RACE = """
import sys, time
from pathlib import Path
from warploom.codegen.cache.key import CacheKey
from warploom.codegen.cache.store import Draft, Store

root, start, seed = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
store = Store(root)
time.sleep(max(0.0, start - time.time()))
for i in range(60):
    key = CacheKey("raced", (("source", str(i)),))
    content = bytes([seed]) * 50_000  # each process writes something else
    if (entry := store.load(key)) is None:
        entry = store.save(key, Draft(("kernel.cu", b"x"), ("kernel.cubin", content), {}))
    found = entry.binary.read_bytes()
    assert len(found) == 50_000 and len(set(found)) == 1, "torn entry"
    assert store.load(key) is not None
"""


def test_processes_race_for_the_same_entries(store: Store) -> None:
    start = str(time.time() + 0.5)
    racers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", RACE, str(store.root), start, str(seed)], cwd="/"
        )
        for seed in range(4)
    ]
    assert [racer.wait(60) for racer in racers] == [0, 0, 0, 0]
    assert len(list(store.kernels.iterdir())) == 60
    winners = {(folder / "kernel.cubin").read_bytes()[:1] for folder in store.kernels.iterdir()}
    assert winners <= {bytes([seed]) for seed in range(4)}


def test_use_is_noted_but_not_on_every_load(store: Store) -> None:
    stamp = store.save(KEY, DRAFT_FILES).folder / "key.json"
    recent = time.time() - 60
    os.utime(stamp, (recent, recent))
    store.load(KEY)
    assert stamp.stat().st_mtime == pytest.approx(recent, abs=1)
    os.utime(stamp, (recent - 7200, recent - 7200))
    store.load(KEY)
    assert stamp.stat().st_mtime == pytest.approx(time.time(), abs=30)


def test_a_read_only_cache_still_serves(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = store.save(KEY, DRAFT_FILES).folder / "key.json"
    os.utime(stamp, (1.0, 1.0))

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Folder, "touch", refuse)
    assert store.load(KEY) is not None


def test_a_failed_write_leaves_nothing_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Folder.write

    def fill_up(folder: Folder, name: str, content: bytes) -> None:
        if name == "key.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(folder, name, content)

    monkeypatch.setattr(Folder, "write", fill_up)
    with pytest.raises(OSError, match="No space"):
        store.save(KEY, DRAFT_FILES)
    assert list(store.kernels.iterdir()) == []
    monkeypatch.undo()
    assert store.save(KEY, DRAFT_FILES).folder.is_dir()


def test_drafts_are_no_entries(store: Store) -> None:
    store.save(KEY, DRAFT_FILES)
    (store.kernels / f"{DRAFT}abc").mkdir()
    assert store.load(KEY) is not None
