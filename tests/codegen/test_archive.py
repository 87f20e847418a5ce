"""Archives of kernels: what was exported serves elsewhere, as it was."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.archives import members

import warploom as wl
from warploom.codegen import build as build_module
from warploom.codegen.archives import archive
from warploom.codegen.build import build, forbid_compilation
from warploom.codegen.cache.store import Store
from warploom.codegen.cache.upkeep import kernels
from warploom.codegen.compilers import hostcc
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.codegen.source import KernelSource
from warploom.deployment_errors import (
    CannotExport,
    WrongArchive,
)

Make = Callable[..., KernelSource]


@pytest.fixture(autouse=True)
def fresh_process(cache: Path) -> Iterator[None]:
    build_module._artifacts.clear()
    yield
    build_module._artifacts.clear()


def test_what_was_exported_serves_elsewhere(
    made: Path, elsewhere: Store, host: HostTarget, cpp_source: Make
) -> None:
    brought = wl.import_kernels(made)
    assert (brought.imported, brought.present) == (2, 0) and brought.bytes > 0
    assert [one.problem for one in kernels(elsewhere)] == [None, None]
    with forbid_compilation():
        found = build(cpp_source("2", "answer 2"), host)
    assert found.path.is_relative_to(elsewhere.root) and not found.compiled
    assert ctypes.CDLL(str(found.path)).warploom_kernel() == 2
    again = wl.import_kernels(made)
    assert (again.imported, again.present, again.bytes) == (0, 2, 0)


def test_facts_come_along(made: Path, cache: Path, elsewhere: Store) -> None:
    wl.import_kernels(made)
    there = {one.item.path.name: one.facts for one in kernels(elsewhere)}
    for one in kernels(Store(cache)):
        found = there[one.item.path.name]
        for name in (*archive.FACTS, "name", "digest", "parts", "sha256", "bytes"):
            assert found.get(name) == one.facts.get(name), name
        assert {"host", "labels", "compile_seconds", "warploom"} <= set(found)


def test_the_same_cache_makes_the_same_archive(made: Path, tmp_path: Path) -> None:
    again = wl.export_kernels(tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == made.read_bytes()
    assert again.sha256 == hashlib.sha256(made.read_bytes()).hexdigest()
    assert (again.kernels, again.left_out, again.bytes) == (2, 0, made.stat().st_size)
    names = list(members(made))
    assert names[:-1] == sorted(names[:-1]) and names[-1] == "manifest.json"


def test_the_digest_of_the_file_is_compared_if_it_is_given(made: Path, elsewhere: Store) -> None:
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    with pytest.raises(WrongArchive, match=rf"{digest}; expected {'0' * 64}"):
        wl.import_kernels(made, sha256="0" * 64)
    assert not kernels(elsewhere)
    assert wl.import_kernels(made, sha256=digest.upper()).imported == 2


def test_back_ends_are_chosen_by_name(made: Path, tmp_path: Path) -> None:
    assert wl.export_kernels(tmp_path / "cpu.zip", archs=["cpu"]).kernels == 2
    for archs in (["sm_80"], ["cpu", "sm_80"]):  # what was asked for must not be left out
        with pytest.raises(CannotExport, match=r"holds no kernel for sm_80 .*warploom build"):
            wl.export_kernels(tmp_path / "none.zip", archs=archs)
    assert not (tmp_path / "none.zip").exists()


def test_kernels_of_other_versions_stay_behind(made: Path, cache: Path, tmp_path: Path) -> None:
    path = sorted(cache.glob("kernels/*/key.json"))[0]
    store = Store(cache)
    facts = json.loads(path.read_text())
    facts["parts"]["headers"] = "older"
    keep = [one for one in kernels(store) if one.item.path != path.parent]
    listed = [*keep, replace(kernels(store)[0], facts=facts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive.upkeep, "kernels", lambda _: listed)
        report = wl.export_kernels(tmp_path / "new.zip")
    assert (report.kernels, report.left_out) == (1, 1)


def test_damaged_kernels_are_not_exported(made: Path, cache: Path) -> None:
    before = made.read_bytes()
    next(cache.glob("kernels/*/kernel.so")).write_bytes(b"changed")
    with pytest.raises(CannotExport, match=r"kernel\.so.*Build it again"):
        wl.export_kernels(made)
    assert made.read_bytes() == before


def test_a_place_that_cannot_be_written_is_named(made: Path, tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match=r"no-such/k\.zip was not written.*Choose a place"):
        wl.export_kernels(tmp_path / "no-such" / "k.zip")
    made.unlink()
    made.mkdir()
    with pytest.raises(CannotExport, match="was not written"):
        wl.export_kernels(made)
    assert not list(tmp_path.glob(".kernels*"))  # what was written aside is gone


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain", "made")
def test_the_hosts_planner_goes_with_every_back_end(
    cuda_source: Make, cpp_source: Make, host: HostTarget, tmp_path: Path
) -> None:
    build(cuda_source(), ARCHS["sm_80"])
    assert wl.export_kernels(tmp_path / "gpu.zip", archs=["sm_80"]).kernels == 1
    build(replace(cpp_source("3"), labels=(("kind", "planner"),)), host)
    assert wl.export_kernels(tmp_path / "gpu.zip", archs=["sm_80"]).kernels == 2
    assert wl.export_kernels(tmp_path / "cpu.zip", archs=["cpu"]).kernels == 3


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
def test_cubins_travel_too(
    cuda_source: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(cuda_source(), ARCHS["sm_90a"])
    wl.export_kernels(tmp_path / "k.zip")
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert wl.import_kernels(tmp_path / "k.zip").imported == 1
    with forbid_compilation():
        found = build(cuda_source(), ARCHS["sm_90a"])
    assert found.resources == built.resources
    assert found.path.read_bytes() == built.path.read_bytes()


def test_an_archive_of_another_processor_comes_in_and_is_not_chosen(
    host: HostTarget, cpp_source: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = hostcc.host_target_for("x86-64") if "-march=native" in host.flags else None
    if plain is None or not set(plain.needs) < set(host.needs):
        pytest.skip("needs an x86 processor with more than the least")
    build(cpp_source("5"), plain)
    wl.export_kernels(tmp_path / "k.zip")
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert wl.import_kernels(tmp_path / "k.zip").imported == 1
    with forbid_compilation():  # what fits serves who may not compile
        assert ctypes.CDLL(str(build(cpp_source("5"), host).path)).warploom_kernel() == 5
