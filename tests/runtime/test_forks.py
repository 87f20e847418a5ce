"""Forked processes: locks and futures of threads that did not come along stop nobody."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import warploom as wl
from warploom import forks
from warploom.codegen import build as build_module
from warploom.codegen.build import build
from warploom.codegen.cache import store
from warploom.codegen.cache.claims import aside
from warploom.codegen.cache.folder import Folder
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.codegen.source import KernelSource
from warploom.dsl.types import ir
from warploom.runtime.devices.tenancy import Tenancy

ROOT = Path(__file__).resolve().parents[2]
SOURCE = KernelSource("forked", "int forked;", "cpp")
HOST = HostTarget(("c++",), "a compiler", ("-O3",), (), "macros")


@pytest.fixture(autouse=True)
def fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "cache"))
    build_module._artifacts.clear()
    yield
    build_module._artifacts.clear()


def in_child(work: Callable[[], object]) -> None:
    """Does something in a forked process, and asserts that it comes to its end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)  # a deadlock kills it
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


@contextmanager
def meanwhile(work: Callable[[threading.Event, threading.Event], object]) -> Iterator[None]:
    """A thread that is at work inside: it sets the first event, and ends after the second."""
    begun, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(begun, go_on))
    thread.start()
    try:
        assert begun.wait(30)
        yield
    finally:
        go_on.set()
        thread.join()


def test_a_child_does_not_wait_for_a_build_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parent = os.getpid()

    def slow(begun: threading.Event, go_on: threading.Event) -> None:
        def run(*_: object) -> tuple[tuple[str, bytes], dict[str, object]]:
            if os.getpid() == in_parent:
                begun.set()
                go_on.wait(30)
            return ("kernel.so", b"library"), {"compile_seconds": 0.1}

        monkeypatch.setattr(build_module, "_run_compiler", run)
        build(SOURCE, HOST)

    def child() -> None:
        assert build(SOURCE, HOST).content == b"library"

    with meanwhile(slow):
        in_child(child)
    assert build(SOURCE, HOST).content == b"library"


def test_locks_that_a_thread_held_are_free() -> None:
    def hold(begun: threading.Event, go_on: threading.Event) -> None:
        locks = list(forks._locks)
        for lock in locks:
            lock.acquire()
        with ir._interning:
            begun.set()
            go_on.wait(30)
        for lock in locks:
            lock.release()

    def child() -> None:
        q, k, v = (torch.ones(1, 2, 4, 16) for _ in range(3))
        wl.attention(q, k, v, variant=wl.Causal(), backend="reference")
        Tenancy(0, None).take(1)
        assert build_module._artifacts_lock.acquire(timeout=1)

    wl.attention(
        *(torch.ones(1, 2, 4, 16) for _ in range(3)), variant=wl.Causal(), backend="reference"
    )
    with meanwhile(hold):
        in_child(child)


def test_every_lock_of_a_module_is_free_after_forks() -> None:
    """`threading.Lock()` at a module's level, or kept by an object, may be held at a fork."""
    expected = {
        "warploom/forks.py",
        "runtime/wrappers/guard.py",
        "dsl/types/ir.py",
    }  # which see to it themselves
    made = set()
    for folder in ("warploom", "dsl", "codegen", "scheduler", "runtime", "serving"):
        for path in (ROOT / folder).rglob("*.py"):
            if re.search(r"\b(R?Lock|Condition|Semaphore)\(", path.read_text()):
                made.add(path.relative_to(ROOT).as_posix())
    assert made == expected


def test_a_child_leaves_its_parents_private_folder_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[Callable[[], object]] = []
    register = SimpleNamespace(register=lambda work, *values: exits.append(partial(work, *values)))
    monkeypatch.setattr(store, "atexit", register)
    store.spare_store.cache_clear()
    mine = store.spare_store().root

    def child() -> None:
        own = store.spare_store().root
        assert own != mine
        for work in exits:
            work()
        assert mine.is_dir() and not own.exists()

    in_child(child)
    assert store.spare_store().root == mine
    exits[0]()
    assert not mine.exists()
    store.spare_store.cache_clear()


def test_a_child_does_not_keep_the_drafts_of_a_killed_parent(tmp_path: Path) -> None:
    (end, send_end), (lives, send_lives) = os.pipe(), os.pipe()
    with Folder.at(tmp_path) as folder:
        draft = aside(folder, "work")
        assert draft is not None
        pid = os.fork()
        if pid == 0:
            os.write(send_lives, b"x")
            os.read(end, 1)  # lives on
            os._exit(0)
        os.read(lives, 1)
        assert aside(folder, "work") is None
        other = os.open(tmp_path, os.O_RDONLY)
        os.dup2(other, draft._lock)  # as at the parent's death: its descriptor is gone
        os.close(other)
        again = aside(folder, "work")
        os.write(send_end, b"x")
        os.waitpid(pid, 0)
        assert again is not None
        again.close()
        draft.close()
    assert list(tmp_path.iterdir()) == []
