"""Archives of kernels: what is exported comes in whole, and anything else is refused by name."""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
import stat
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZipFile, ZipInfo

import pytest

import warploom as wl
from warploom.codegen import archive, hostcc
from warploom.codegen import build as build_module
from warploom.codegen.arch import ARCHS
from warploom.codegen.build import build, forbid_compilation
from warploom.codegen.hostcc import HostTarget, host_target
from warploom.codegen.source import KernelSource
from warploom.codegen.store import Store
from warploom.codegen.upkeep import kernels
from warploom.deployment_errors import (
    ArchiveError,
    ArchiveTooLarge,
    CacheNotWritable,
    CannotExport,
    DamagedArchive,
    NewerArchive,
    OtherHeaders,
    UnsafeArchive,
    WrongArchive,
)
from warploom.errors import NoHostCompiler

Make = Callable[..., KernelSource]
CPP_TEXT = """
extern "C" __attribute__((visibility("default"))) int warploom_kernel() { return %s; }
"""
Members = dict[str, bytes]


@pytest.fixture(autouse=True)
def fresh_process(cache: Path) -> Iterator[None]:
    build_module._artifacts.clear()
    yield
    build_module._artifacts.clear()


@pytest.fixture(scope="module")
def host() -> HostTarget:
    try:
        return host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def filled(host: HostTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of two kernels, to be copied."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARPLOOM_CACHE_DIR", str(folder))
        for number in ("1", "2"):
            build(KernelSource(f"answer {number}", CPP_TEXT % number, "cpp"), host)
    return folder


@pytest.fixture
def made(filled: Path, cache: Path, tmp_path: Path) -> Path:
    """An archive of two kernels, which are in the cache."""
    shutil.copytree(filled, cache)
    wl.export_kernels(tmp_path / "kernels.zip")
    return tmp_path / "kernels.zip"


@pytest.fixture
def elsewhere(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty cache, which all that follows uses."""
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "elsewhere"))
    build_module._artifacts.clear()
    return Store(tmp_path / "elsewhere")


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
    for one in kernels(Store(cache)):
        there = {x.item.path.name: x.facts for x in kernels(elsewhere)}[one.item.path.name]
        assert {**one.facts, "created": 0} == {**there, "created": 0}
        assert {"host", "labels", "compile_seconds", "warploom"} <= set(there)


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
    assert wl.export_kernels(tmp_path / "cpu.zip", archs=["cpu", "sm_80"]).kernels == 2
    with pytest.raises(CannotExport, match=r"holds no kernel for sm_80 .*warploom build"):
        wl.export_kernels(tmp_path / "none.zip", archs=["sm_80"])
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


@pytest.mark.parametrize("kept", [0, 1, 50, 0.5, 0.9, -1])
def test_a_file_that_was_cut_off_is_refused(made: Path, elsewhere: Store, kept: float) -> None:
    whole = made.read_bytes()
    made.write_bytes(whole[: int(kept * len(whole)) if 0 < kept < 1 else int(kept)])
    refused(made, elsewhere, DamagedArchive, r"Copy the file again")


def test_a_file_that_is_not_there_is_named(tmp_path: Path, elsewhere: Store) -> None:
    for options in ({}, {"sha256": "0"}):
        with pytest.raises(DamagedArchive, match=r"no\.zip.*No such file"):
            wl.import_kernels(tmp_path / "no.zip", **options)


def test_no_single_changed_byte_comes_in(made: Path, elsewhere: Store) -> None:
    """Refused, or without consequence: dates and comments of the zip are nobody's."""
    whole = bytearray(made.read_bytes())
    refusals = 0
    for at in range(0, len(whole), max(1, len(whole) // 400)):
        changed = bytes(whole[:at]) + bytes([whole[at] ^ 0x41]) + bytes(whole[at + 1 :])
        made.write_bytes(changed)
        try:
            wl.import_kernels(made)
        except ArchiveError as error:
            refusals += 1
            assert str(made) in str(error)
            assert not list(elsewhere.root.glob("kernels/*"))
        else:
            assert [one.problem for one in kernels(elsewhere)] == [None, None]
            shutil.rmtree(elsewhere.root)
    assert refusals > 300


def test_a_changed_kernel_is_refused(made: Path, elsewhere: Store) -> None:
    whole = members(made)
    for name in whole:
        if name != "manifest.json":
            changed = whole[name][:-1] + bytes([whole[name][-1] ^ 1])
            rewrite(made, whole | {name: changed})
            refused(made, elsewhere, DamagedArchive, rf"{name} was changed")
            rewrite(made, whole | {name: whole[name] + b"!"})
            refused(made, elsewhere, DamagedArchive, rf"{name} has \d+ bytes, and not \d+")
            rewrite(made, {other: data for other, data in whole.items() if other != name})
            refused(made, elsewhere, DamagedArchive, f"{name} is missing")


def test_a_source_that_is_not_its_keys_is_refused(made: Path, elsewhere: Store) -> None:
    """Checksums that fit do not help: the key is made of the source."""
    whole = members(made)
    name = next(name for name in whole if name.endswith(".cpp"))
    text = whole[name].replace(b"return", b"return  ")
    rewrite(made, whole | {name: text})

    def agree(manifest: dict[str, Any]) -> None:
        (file,) = (
            one
            for kernel in manifest["kernels"]
            for one in kernel["files"]
            if kernel["folder"] in name and one["name"].endswith(".cpp")
        )
        file |= {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}

    change_manifest(made, agree)
    refused(made, elsewhere, DamagedArchive, "is not the source of its key")


@pytest.mark.parametrize(
    "name",
    [
        "../escape.so", "/etc/escape.so", "kernels/../../escape.so", "..\\escape.so", "C:\\x.so",
        "kernels/other/kernel.so", "key.json", "kernels/", "kernels/a\0b.so",
    ],
)  # fmt: skip
def test_names_that_the_manifest_does_not_list_are_refused(
    made: Path, elsewhere: Store, name: str
) -> None:
    rewrite(made, members(made) | {name: b"" if name.endswith("/") else b"x"})
    refused(made, elsewhere, UnsafeArchive, "a source that you trust")
    assert not list(elsewhere.root.parent.rglob("escape.so"))


@pytest.mark.parametrize("folder", ["../../escape", "/tmp/escape", "..", "", "x" * 3000, 7, None])
def test_folders_of_the_manifest_are_never_paths(made: Path, elsewhere: Store, folder: Any) -> None:
    whole = members(made)
    first = json.loads(whole["manifest.json"])["kernels"][0]["folder"]
    moved = {name.replace(first, str(folder)): data for name, data in whole.items()}
    rewrite(made, moved)
    change_manifest(made, lambda manifest: manifest["kernels"][0].update(folder=folder))
    refused(made, elsewhere, (DamagedArchive, UnsafeArchive), "Nothing was")  # type: ignore[arg-type]
    assert not list(elsewhere.root.parent.rglob("*escape*"))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFDIR, stat.S_IFIFO, stat.S_IFCHR])
def test_links_and_devices_are_refused(made: Path, elsewhere: Store, kind: int) -> None:
    whole = members(made)
    with ZipFile(made, "w") as file:
        for name, data in whole.items():
            info = ZipInfo(name)
            info.external_attr = ((kind if name.endswith(".so") else stat.S_IFREG) | 0o777) << 16
            file.writestr(info, b"/etc/passwd" if name.endswith(".so") else data)
    refused(made, elsewhere, UnsafeArchive, r"kernel\.so' is no plain file")


def test_a_name_that_is_there_twice_is_refused(made: Path, elsewhere: Store) -> None:
    whole = members(made)
    name = next(name for name in whole if name.endswith(".so"))
    with warnings.catch_warnings(), ZipFile(made, "a") as file:
        warnings.simplefilter("ignore")  # zipfile warns, and writes it
        file.writestr(name, b"another")
    refused(made, elsewhere, UnsafeArchive, f"{name}' is there twice")
    rewrite(made, whole)
    change_manifest(made, lambda manifest: manifest["kernels"].append(manifest["kernels"][0]))
    refused(made, elsewhere, DamagedArchive, "twice")


def test_other_ways_to_pack_are_refused(made: Path, elsewhere: Store) -> None:
    whole = members(made)
    with ZipFile(made, "w", ZIP_BZIP2) as file:
        for name, data in whole.items():
            file.writestr(name, data)
    refused(made, elsewhere, UnsafeArchive, "packed in another way")


def test_what_unpacks_to_more_than_the_cache_takes_is_refused(
    made: Path, elsewhere: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE_SIZE", "0")
    refused(made, elsewhere, ArchiveTooLarge, r"unpacks to 1 MiB; .* raise WARPLOOM_CACHE_SIZE")


def test_bombs_are_refused_before_they_unpack(made: Path, elsewhere: Store) -> None:
    whole = members(made)
    name = next(name for name in whole if name.endswith(".so"))
    rewrite(made, whole | {name: bytes(257 << 20)})
    assert made.stat().st_size < 1 << 20
    refused(made, elsewhere, UnsafeArchive, f"{name}' unpacks to 257 MiB")
    rewrite(made, whole | {"manifest.json": bytes(65 << 20)})
    refused(made, elsewhere, UnsafeArchive, r"manifest\.json is too large")


def test_a_size_that_lies_unpacks_no_further(made: Path, elsewhere: Store) -> None:
    """The zip's directory says that a file is small, and its stream goes on."""
    whole = members(made)
    name = next(name for name in whole if name.endswith(".so"))
    size = len(whole[name])
    rewrite(made, whole | {name: bytes(50 << 20)})
    data = made.read_bytes().replace(struct.pack("<I", 50 << 20), struct.pack("<I", size))
    made.write_bytes(data)
    refused(made, elsewhere, DamagedArchive, name)


def test_a_newer_format_asks_for_that_version(made: Path, elsewhere: Store) -> None:
    change_manifest(made, lambda manifest: manifest.update(format=2, warploom="9.1", kernels=[]))
    refused(made, elsewhere, NewerArchive, r"format 2, of warploom 9\.1.*Install that version")


def test_kernels_with_other_headers_would_never_be_found(
    made: Path, elsewhere: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "header_digest", lambda *_: "of another version")
    refused(made, elsewhere, OtherHeaders, r"answer 1, which this installation .* Build and export")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format": "1", "kernels": []}', '{"format": 1}', "[" * 200_000,
     '{"format": 1, "kernels": {}}', '{"format": 1, "kernels": [7]}', "1" * 5000,
     '{"format": 1, "kernels": [{"parts": {"language": []}}]}',
     '{"format": 1, "kernels": [{"parts": {"language": "cpp"}, "files": [1, 2]}]}'],
)  # fmt: skip
def test_a_manifest_that_says_nothing_is_damaged(made: Path, elsewhere: Store, text: str) -> None:
    rewrite(made, members(made) | {"manifest.json": text.encode()})
    refused(made, elsewhere, DamagedArchive, r"manifest\.json")


@pytest.mark.parametrize(
    ("label", "value"),
    [("name", 3), ("digest", "0" * 64), ("parts", {"language": "cpp"}), ("facts", {}),
     ("facts", {"warploom": "1", "compile_seconds": "soon", "labels": {}, "host": {}}),
     ("facts", {"warploom": "1", "compile_seconds": 1, "labels": {}, "host": {"features": [1]}}),
     ("facts", {"warploom": "1", "compile_seconds": 1, "labels": {}, "binary": "../x"}),
     ("files", []), ("files", [{"name": "kernel.cpp"}, {"name": "../kernel.so"}])],
)  # fmt: skip
def test_a_manifest_whose_kernel_is_none_is_damaged(
    made: Path, elsewhere: Store, label: str, value: Any
) -> None:
    change_manifest(made, lambda manifest: manifest["kernels"][1].update({label: value}))
    refused(made, elsewhere, DamagedArchive, "Nothing was")


def test_no_manifest_is_damage(made: Path, elsewhere: Store) -> None:
    content = members(made)
    del content["manifest.json"]
    rewrite(made, content)
    refused(made, elsewhere, DamagedArchive, r"has no manifest\.json")


def test_a_cache_that_cannot_be_written_is_named(
    made: Path, elsewhere: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        CacheNotWritable, match=r"file/cache cannot be written .*WARPLOOM_CACHE_DIR"
    ):
        wl.import_kernels(made)


def test_what_came_in_before_the_disk_was_full_is_good(
    made: Path, elsewhere: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = Store.save, []

    def fill(store: Store, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return save(store, *args)

    monkeypatch.setattr(Store, "save", fill)
    with pytest.raises(CacheNotWritable, match="No space left"):
        wl.import_kernels(made)
    assert [one.problem for one in kernels(elsewhere)] == [None]
    report = wl.import_kernels(made)
    assert (report.imported, report.present) == (1, 1)


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
