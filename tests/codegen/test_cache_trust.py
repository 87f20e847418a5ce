"""What somebody else could have written does not run."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warploom.codegen import build as build_module
from warploom.codegen.build import build, forbid_compilation
from warploom.codegen.cache import folder as folder_module
from warploom.codegen.cache import store as store_module
from warploom.codegen.cache import upkeep
from warploom.codegen.cache.facts import sealed, unsealed
from warploom.codegen.cache.folder import Folder, Untrusted
from warploom.codegen.cache.key import CacheKey
from warploom.codegen.cache.store import DamagedEntry, Draft, Store, read_entry
from warploom.codegen.compilers import recorded_target
from warploom.codegen.compilers.hostcc import HostTarget, host_target
from warploom.codegen.source import KernelSource
from warploom.errors import CacheWarning, CompileForbidden, NoHostCompiler
from warploom.runtime.devices.library import load_library

Make = Callable[..., KernelSource]
KEY = CacheKey("scale", (("source", "text"), ("target", "sm_80")))
DRAFT = Draft(("kernel.cu", b"text"), ("kernel.cubin", b"binary"), {"compile_seconds": 1.5})


@pytest.fixture(autouse=True)
def fresh_process(cache: Path) -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    build_module._artifacts.clear()
    build_module._warn_unwritable.cache_clear()
    store_module.warn_refused.cache_clear()


@pytest.fixture
def host() -> HostTarget:
    try:
        return host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))


@pytest.fixture
def store(cache: Path) -> Store:
    return Store(cache)


def become_another_user(monkeypatch: pytest.MonkeyPatch, files_are_roots: bool) -> None:
    """What lies there belongs to somebody else: to root, or to anybody."""
    owner = os.geteuid()
    monkeypatch.setattr(folder_module.os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(folder_module, "_ROOT", owner if files_are_roots else -1)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_modes_do_not_depend_on_the_umask(store: Store, umask: int) -> None:
    before = os.umask(umask)
    try:
        store.save(KEY, DRAFT)
        store.keep_failed(KEY, "kernel.cu", b"text")
        upkeep._sweep_once.cache_clear()
        upkeep._sweep_once(store.root, 1 << 30, 1e9)
    finally:
        os.umask(before)
    for path in store.root.rglob("*"):
        expected = 0o755 if path.is_dir() else 0o644
        assert path.stat().st_mode & 0o777 == expected, path
    assert store.root.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
@pytest.mark.parametrize("place", ["", "kernels"])
def test_a_cache_that_others_may_write_is_not_used(
    cpp_source: Make, host: HostTarget, cache: Path, mode: int, place: str
) -> None:
    build(cpp_source("41"), host)
    forget()
    (cache / place).chmod(mode)
    with pytest.warns(CacheWarning, match=r"is not used: others may write.*chmod go-w") as caught:
        found = build(cpp_source("41"), host)
        build(cpp_source("43"), host)
    assert len(caught) == 1
    assert found.compiled and not found.path.is_relative_to(cache)
    assert load_library(found).warploom_kernel() == 41
    assert len(list((cache / "kernels").iterdir())) == 1  # nothing was written there either
    forget()
    with pytest.warns(CacheWarning), forbid_compilation(), pytest.raises(CompileForbidden):
        build(cpp_source("41"), host)
    (cache / place).chmod(0o755)
    assert not build(cpp_source("41"), host).compiled


def test_a_cache_of_another_user_is_not_used(
    cpp_source: Make, host: HostTarget, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(cpp_source("41"), host)
    forget()
    become_another_user(monkeypatch, files_are_roots=False)
    entry = next((cache / "kernels").iterdir())
    with pytest.warns(CacheWarning, match=r"belongs to user \d+, and not to root or to you"):
        assert Store(cache).load(CacheKey("answer", ())) is None
    with pytest.raises(DamagedEntry, match="belongs to user"):
        read_entry(entry)
    with pytest.raises(Untrusted):
        upkeep.clear(Store(cache))
    assert entry.exists()


def test_what_root_put_into_an_image_serves_everybody(
    cpp_source: Make, host: HostTarget, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(cpp_source("41"), host)
    forget()
    become_another_user(monkeypatch, files_are_roots=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = build(cpp_source("41"), host)
    assert found.path == built.path and not found.compiled
    assert load_library(found).warploom_kernel() == 41


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_in_a_sticky_folder_others_may_have_been_first(tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o1777)
    planted = public / "cache"
    planted.mkdir(mode=0o755)
    os.chown(planted, 65534, 65534)
    with pytest.raises(Untrusted, match="belongs to user 65534"):
        Store(planted).save(KEY, DRAFT)
    assert list(planted.iterdir()) == []
    planted.rmdir()
    planted.symlink_to(tmp_path)
    os.chown(planted, 65534, 65534, follow_symlinks=False)
    with pytest.raises(Untrusted, match="is a link of user 65534"):
        Store(planted).save(KEY, DRAFT)
    os.chown(planted, 0, 0, follow_symlinks=False)  # one's own leads where one wants it
    assert Store(planted).save(KEY, DRAFT).folder.exists()


def plant_link(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("file", ["key.json", "kernel.cu", "kernel.cubin", ""])
def test_links_in_the_place_of_entries_and_files_are_not_followed(
    store: Store, tmp_path: Path, file: str
) -> None:
    folder = store.save(KEY, DRAFT).folder
    elsewhere = tmp_path / "elsewhere"
    plant_link(folder / file if file else folder, elsewhere)
    with pytest.warns(CacheWarning, match="is a link"):
        assert store.load(KEY) is None
    assert elsewhere.exists() and not folder.exists()
    assert store.save(KEY, DRAFT).content == b"binary"
    assert store.load(KEY) is not None


@pytest.mark.parametrize("part", ["kernels", "failed"])
def test_links_in_the_place_of_a_part_of_the_cache_are_not_followed(
    store: Store, tmp_path: Path, part: str
) -> None:
    store.save(KEY, DRAFT)
    store.keep_failed(KEY, "kernel.cu", b"text")
    elsewhere = tmp_path / "elsewhere"
    plant_link(store.root / part, elsewhere)
    before = sorted(elsewhere.rglob("*"))
    save = {
        "kernels": lambda: store.save(KEY, DRAFT),
        "failed": lambda: store.keep_failed(KEY, "kernel.cu", b"other"),
    }[part]
    with pytest.raises(Untrusted, match="is a link"):
        save()
    with pytest.raises(Untrusted, match="is a link"):
        upkeep.clear(store)
    assert sorted(elsewhere.rglob("*")) == before


@pytest.mark.parametrize("file", ["key.json", "kernel.cu", "kernel.cubin", ""])
def test_files_that_others_may_write_are_built_again(store: Store, file: str) -> None:
    path = store.save(KEY, DRAFT).folder / file
    path.chmod(0o777)
    with pytest.warns(CacheWarning, match="others may write"):
        assert store.load(KEY) is None
    assert not path.exists()


def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(store: Store) -> None:
    path = store.save(KEY, DRAFT).folder / "kernel.cubin"
    path.unlink()
    os.mkfifo(path, 0o644)
    with pytest.warns(CacheWarning, match="no plain file"):
        assert store.load(KEY) is None


@pytest.mark.parametrize("binary", ["../planted.so", "/tmp/planted.so", "planted.so", "", 3, None])
def test_no_entry_names_another_file(store: Store, binary: object) -> None:
    folder = store.save(KEY, DRAFT).folder
    facts = unsealed((folder / "key.json").read_bytes())
    with pytest.raises(ValueError, match="'binary' is of the wrong kind"):
        sealed({**facts, "binary": binary})
    with pytest.raises(ValueError, match="an entry holds no"):
        store.save(KEY, Draft(("kernel.cu", b""), (str(binary), b""), {}))


EXTRAS = {
    "labels": {"kind": "cpu"},
    "resources": {"registers": 1, "local_bytes": 2, "shared_bytes": 3, "spill_bytes": None},
    "host": {"features": ["a"], "needs": []},
}


def test_facts_that_are_missing_or_odd_are_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right digest over wrong facts does not make a load fail in another way."""
    draft = Draft(DRAFT.source, DRAFT.binary, {**DRAFT.facts, **EXTRAS})
    path = store.save(KEY, draft).folder / "key.json"
    good = unsealed(path.read_bytes())
    bad = [{**good, name: odd} for name in good for odd in ([3], {"a": 1}, True)]
    bad += [{**good, "resources": {"registers": 1}}, {**good, "labels": {"kind": 3}}]
    for without in set(good) - {*EXTRAS, "compile_seconds"}:
        bad.append({name: fact for name, fact in good.items() if name != without})
    for facts in bad:
        with monkeypatch.context() as patch:
            patch.setattr("warploom.codegen.cache.facts.check", lambda _: None)
            path.write_bytes(sealed(facts))
        with pytest.raises(DamagedEntry, match=r"key\.json"):
            read_entry(path.parent)
        assert upkeep.kernels(store)[0].problem
        assert list(recorded_target._all_facts(store.root)) == []


def exchange_file(path: Path, other: bytes) -> None:
    path.unlink()
    path.write_bytes(other)


def exchange_entry(path: Path, other: bytes) -> None:
    path.parent.rename(path.parent.with_name("moved"))
    path.parent.mkdir(mode=0o755)
    path.write_bytes(other)
    path.chmod(0o644)


def exchange_cache(path: Path, other: bytes) -> None:
    cache = path.parents[2]
    shutil.copytree(cache, cache.with_name("planted"))
    cache.rename(cache.with_name("moved"))
    cache.with_name("planted").rename(cache)
    exchange_file(path, other)


@pytest.mark.parametrize("exchange", [exchange_file, exchange_entry, exchange_cache])
def test_what_is_checked_is_what_is_loaded(
    cpp_source: Make, host: HostTarget, exchange: Callable[[Path, bytes], None]
) -> None:
    other = build(cpp_source("666"), host).content
    artifact = build(cpp_source("42"), host)
    exchange(artifact.path, other)
    with pytest.raises(OSError, match="changed since it was checked"):
        load_library(artifact)


def test_a_folder_that_is_open_stays_the_one_that_was_checked(tmp_path: Path) -> None:
    mine, planted = tmp_path / "mine", tmp_path / "planted"
    for folder, text in ((mine, b"mine"), (planted, b"planted")):
        folder.mkdir(mode=0o755)
        (folder / "file").write_bytes(text)
        (folder / "file").chmod(0o644)
    with Folder.at(mine) as folder:
        mine.rename(tmp_path / "moved")
        planted.rename(mine)
        assert folder.read("file") == b"mine"
        assert Path(folder.place, "file").read_bytes() == b"mine"
        folder.write("new", b"")
    assert (tmp_path / "moved" / "new").exists() and not (mine / "new").exists()


def test_libraries_of_two_caches_are_not_taken_for_one_another(
    cpp_source: Make, host: HostTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The linker goes by the path; descriptors in it are never used twice."""
    found = []
    for i in range(5):
        monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / str(i)))
        found.append(load_library(build(cpp_source(str(i), name="same"), host)))
    assert [library.warploom_kernel() for library in found] == list(range(5))


def test_headers_planted_by_variables_are_not_seen(
    cpp_source: Make, host: HostTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cmath").write_text("#define PLANTED 1\n#include_next <cmath>\n")
    text = """
#include <cmath>
#ifndef PLANTED
#define PLANTED 0
#endif
extern "C" __attribute__((visibility("default"))) int warploom_kernel() { return PLANTED; }
"""
    for name in ("CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("CCC_OVERRIDE_OPTIONS", f"+-I{tmp_path}")
    artifact = build(KernelSource("planted", text, "cpp"), host)
    assert load_library(artifact).warploom_kernel() == 0
    monkeypatch.setenv("CXX", f"{host.command[0]} -I{tmp_path}")  # said openly: it is in the key
    asked = build(KernelSource("planted", text, "cpp"), host_target())
    assert asked.path != artifact.path
    assert ctypes.CDLL(str(asked.path)).warploom_kernel() == 1


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("flags", [[], ["-I"]])
def test_planted_modules_are_not_imported(tmp_path: Path, flags: list[str]) -> None:
    """Neither from the working folder, nor from where variables say that this process ignored."""
    planted, script = tmp_path / "planted", tmp_path / "script.py"
    planted.mkdir()
    for name in ("json", "pickle", "ctypes", "sitecustomize"):
        (planted / f"{name}.py").write_text(f"open('ran', 'w')\nraise SystemExit({name!r})\n")
    script.write_text(f"""
import sys
sys.path += {sys.path!r}
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.nvrtc import compile_cuda
sys.path.insert(0, "")  # as in an interactive session
assert compile_cuda("__global__ void f() {{}}", ARCHS["sm_80"])
""")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    if flags:
        environment["PYTHONPATH"] = str(planted)
    done = subprocess.run(
        [sys.executable, *flags, str(script)],
        cwd=planted,
        env={**environment, "WARPLOOM_PCH": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not (planted / "ran").exists()
