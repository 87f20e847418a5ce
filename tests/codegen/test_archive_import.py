"""Archives that are damaged, foreign or malicious are refused by name, and nothing comes in."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_BZIP2, ZipFile, ZipInfo

import pytest
from support.archives import change_manifest, members, refused, rewrite

import warploom as wl
from warploom.codegen.archives import archive
from warploom.codegen.cache.store import Store
from warploom.codegen.cache.upkeep import kernels
from warploom.codegen.source import KernelSource
from warploom.deployment_errors import (
    ArchiveError,
    ArchiveTooLarge,
    CacheNotWritable,
    DamagedArchive,
    NewerArchive,
    NoArchive,
    OtherHeaders,
    UnsafeArchive,
)

Make = Callable[..., KernelSource]


@pytest.mark.parametrize("kept", [0, 1, 50, 0.5, 0.9, -1])
def test_a_file_that_was_cut_off_is_refused(made: Path, elsewhere: Store, kept: float) -> None:
    whole = made.read_bytes()
    made.write_bytes(whole[: int(kept * len(whole)) if 0 < kept < 1 else int(kept)])
    refused(made, elsewhere, DamagedArchive, r"Copy the file again")


def test_a_file_that_is_not_there_is_named(tmp_path: Path, elsewhere: Store) -> None:
    for options in ({}, {"sha256": "0"}):
        with pytest.raises(NoArchive, match=r"no\.zip does not exist\. Give the path"):
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
