"""Listing, checking, clearing and limiting the cache."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from warploom.codegen.cache import upkeep
from warploom.codegen.cache.claims import DRAFT, aside
from warploom.codegen.cache.key import CacheKey
from warploom.codegen.cache.store import Draft, Store

HOUR = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def add(store: Store, name: str, *, size: int = 1000, hours_ago: float = 0.0) -> Path:
    """An entry whose binary has `size` bytes, last used `hours_ago`."""
    key = CacheKey(name, (("source", name), ("target", "sm_80")))
    draft = Draft(("kernel.cu", b""), ("kernel.cubin", bytes(size)), {"compile_seconds": 1.0})
    folder = store.save(key, draft).folder
    used = time.time() - hours_ago * HOUR
    os.utime(folder / "key.json", (used, used))
    return folder


def add_image(store: Store, *, size: int, hours_ago: float) -> Path:
    path = store.root / "pch" / "0123.pch"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    used = time.time() - hours_ago * HOUR
    os.utime(path, (used, used))
    return path


def test_kernels_are_listed_by_use_and_checked(store: Store) -> None:
    assert upkeep.kernels(store) == []
    add(store, "old", hours_ago=5)
    add(store, "new")
    (add(store, "hurt", hours_ago=2) / "kernel.cubin").write_bytes(b"x")
    listed = upkeep.kernels(store)
    assert [kernel.facts.get("name") for kernel in listed] == ["new", None, "old"]
    assert listed[1].problem is not None and "kernel.cubin" in listed[1].problem
    assert listed[0].problem is None and listed[0].item.size > 1000


def test_the_oldest_go_until_the_rest_fits(store: Store) -> None:
    folders = [add(store, f"k{i}", size=100_000, hours_ago=i) for i in range(5)]
    image = add_image(store, size=150_000, hours_ago=1.5)
    removed = upkeep.sweep(store, max_bytes=400_000, max_age=100 * HOUR)
    assert [folder.exists() for folder in folders] == [True, True, False, False, False]
    assert image.exists()
    assert {item.path for item in removed} == set(folders[2:])


def test_what_nobody_used_for_long_goes(store: Store) -> None:
    old, new = add(store, "old", hours_ago=50), add(store, "new", hours_ago=1)
    image = add_image(store, size=10, hours_ago=60)
    upkeep.sweep(store, max_bytes=1 << 30, max_age=24 * HOUR)
    assert (old.exists(), new.exists(), image.exists()) == (False, True, False)


def test_one_large_old_item_does_not_evict_small_newer_ones(store: Store) -> None:
    small, newest = add(store, "small", size=10, hours_ago=9), add(store, "newest", size=10)
    large = add(store, "large", size=1_000_000, hours_ago=1)
    upkeep.sweep(store, max_bytes=100_000, max_age=100 * HOUR)
    assert (newest.exists(), large.exists(), small.exists()) == (True, False, True)


def test_drafts_of_dead_processes_go_and_those_at_work_stay(store: Store) -> None:
    add(store, "k")
    dead, at_work = [], []
    for part in ("kernels", "failed", "pch"):
        with store.open(part, make=True) as folder, ExitStack() as stack:
            dead.append(folder.path / f"{DRAFT}dead")
            dead[-1].mkdir()
            (dead[-1] / "kernel.cu").touch()
            working = aside(folder, "working")
            assert working is not None
            at_work.append(folder.path / working.name)
            stack.enter_context(working)
            upkeep.sweep(store, max_bytes=1 << 30, max_age=100 * HOUR)
            assert not dead[-1].exists() and at_work[-1].exists()
            upkeep.clear(store)
            assert at_work[-1].exists()
            assert aside(folder, "working") is None
    assert not any(path.exists() for path in (*dead, *at_work))
    assert all(list((store.root / part).iterdir()) == [] for part in ("kernels", "failed", "pch"))


def test_a_sweep_happens_once_a_day(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE_AGE", "1")
    first = add(store, "first", hours_ago=30)
    upkeep.sweep_daily(store)
    second = add(store, "second", hours_ago=30)
    upkeep._sweep_once.cache_clear()  # another process on the same day
    upkeep.sweep_daily(store)
    assert (first.exists(), second.exists()) == (False, True)
    yesterday = time.time() - 25 * HOUR
    os.utime(store.root / ".swept", (yesterday, yesterday))
    upkeep.sweep_daily(store)  # this process has had its turn
    assert second.exists()
    upkeep._sweep_once.cache_clear()
    upkeep.sweep_daily(store)
    assert not second.exists()


def test_clearing_takes_only_what_is_ours(store: Store) -> None:
    """A user may point WARPLOOM_CACHE_DIR at a folder that holds other things."""
    kernel = add(store, "k", size=5000)
    failed = store.keep_failed(CacheKey("bad", ()), "kernel.cu", b"text")
    image = add_image(store, size=100, hours_ago=0)
    theirs = [store.root / "thesis.tex", store.kernels / "notes.txt", store.root / "pch/readme"]
    for path in theirs:
        path.write_text("mine")
    (store.kernels / "my-folder").mkdir()
    (store.kernels / f"{DRAFT}x").mkdir()
    count, size = upkeep.clear(store)
    assert count == 3 and size > 5000
    assert not any(path.exists() for path in (kernel, failed, image, store.kernels / f"{DRAFT}x"))
    assert all(path.exists() for path in theirs) and (store.kernels / "my-folder").exists()
