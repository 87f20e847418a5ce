"""Whatever fails, and whenever a process dies: the right kernel or an error of ours, then order."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.faulty_os import FaultyOs, dying, failing, full, in_place

from warploom import env
from warploom.codegen import build as build_module
from warploom.codegen.build import Artifact, build
from warploom.codegen.cache import store, upkeep
from warploom.codegen.cache.store import Store
from warploom.codegen.compilers import hostcc, pch
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.codegen.source import KernelSource
from warploom.deployment_errors import NowhereToWrite
from warploom.errors import CacheWarning, WarploomError

HOST = HostTarget(("c++",), "a compiler", ("-O3",), (), "macros")
LIBRARY = b"library of " * 5000
SOURCE = KernelSource("answer", "int answer;", "cpp")
BROKEN = KernelSource("broken", "int broken", "cpp")
at_exit: list[tuple[Callable[..., object], tuple[object, ...]]] = []
_LEAST, _LIMIT = 20, 400  # operations of a scenario

Scenario = Callable[[], "Artifact | None"]


def compile_at_once(command: list[str], _: object) -> subprocess.CompletedProcess[str]:
    """A compiler, as its caller sees it."""
    *_, text, _, library = command
    if "broken" in Path(text).read_text():
        return subprocess.CompletedProcess(command, 1, "", "1 error")
    Path(library).write_bytes(LIBRARY)
    Path(library).chmod(0o755)
    return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture(autouse=True)
def places(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of temporary files that only this test sees."""
    spare = tmp_path / "tmp"
    spare.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    monkeypatch.setattr(hostcc, "_started", compile_at_once)
    exits = SimpleNamespace(register=lambda work, *arguments: at_exit.append((work, arguments)))
    monkeypatch.setattr(store, "atexit", exits)
    forget()
    yield spare
    forget()


def forget() -> None:
    """As if this process had built nothing yet, and made no folder of its own."""
    build_module._artifacts.clear()
    build_module._sweep_spare_once.cache_clear()
    build_module._warn_unwritable.cache_clear()
    store.warn_refused.cache_clear()
    upkeep._sweep_once.cache_clear()
    store.spare_store.cache_clear()


def empty_cache() -> Artifact:
    return build(SOURCE, HOST)


def filled_cache() -> Artifact:
    return build(SOURCE, HOST)


def damaged_entry() -> Artifact:
    return build(SOURCE, HOST)


def source_that_does_not_compile() -> None:
    for _ in range(2):
        with pytest.raises(WarploomError):
            build(BROKEN, HOST)


def limits_of_the_cache() -> Artifact:
    upkeep._sweep_once(env.cache_dir(), 0, 0.0)
    return build(SOURCE, HOST)


def prepare(scenario: Scenario, cache: Path) -> None:
    """What lies there before."""
    if cache.exists():
        upkeep.clear(Store(cache))
        (cache / ".swept").unlink(missing_ok=True)
    if scenario in (filled_cache, damaged_entry, limits_of_the_cache):
        path = build(SOURCE, HOST).path
        if scenario is damaged_entry:
            path.write_bytes(b"cut")
        if scenario is limits_of_the_cache:
            (cache / ".swept").unlink(missing_ok=True)
    forget()


def image_of_headers() -> None:
    folder = env.cache_dir() / "pch"
    for result in ("created", "used", "rejected", "failed"):
        image = pch.choose(folder, "#include <a>\n", ())
        if image.mode == "create":
            image.path.write_bytes(b"image")
        if image.mode == "use":
            assert image.path.read_bytes() == b"image"
        image.finish(result)


SCENARIOS = [empty_cache, filled_cache, damaged_entry, source_that_does_not_compile]
SCENARIOS += [limits_of_the_cache, image_of_headers]
named = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)


def assert_all_is_well(scenario: Scenario, cache: Path, spare: Path) -> None:
    """The next process gets the right kernel, without a complaint, and nothing stays behind."""
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if is_damaged(cache) else "error", CacheWarning)
        found = build(SOURCE, HOST)
    assert found.content == found.path.read_bytes() == LIBRARY
    assert found.path.is_relative_to(cache)
    build(KernelSource("another", f"int at{time.perf_counter_ns()};", "cpp"), HOST)
    if scenario in (source_that_does_not_compile, image_of_headers):  # what they write elsewhere
        scenario()
    assert [path for path in cache.rglob("*") if ".draft" in path.name] == []
    assert list(spare.iterdir()) == []


def is_damaged(cache: Path) -> bool:
    """A process died that was to remove a damaged entry; the next one says so."""
    return any(path.read_bytes() == b"cut" for path in cache.rglob("kernel.so"))


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("scenario", "which"),
    [(scenario, 0) for scenario in SCENARIOS] + [(empty_cache, 1), (damaged_entry, 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_each_file_operation_fails_once(
    scenario: Scenario, which: int, cache: Path, places: Path
) -> None:
    for n in range(1, _LIMIT):
        prepare(scenario, cache)
        faulty = FaultyOs(n, failing(which))
        with suppress(WarploomError), in_place(faulty), warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", CacheWarning)
            artifact = scenario()
            assert artifact is None or artifact.content == LIBRARY
        end_process()
        assert_all_is_well(scenario, cache, places)
        if faulty.count < n:
            assert n > _LEAST
            return
    raise AssertionError("more operations than expected")


def test_a_disk_that_is_full_from_some_moment_on(cache: Path, places: Path) -> None:
    """The temporary folder is on it, too: then there is an error that says what to do."""
    refused = 0
    for n in range(1, _LIMIT):
        prepare(empty_cache, cache)
        faulty = FaultyOs(n, full, lasting=True)
        try:
            with in_place(faulty), warnings.catch_warnings():
                warnings.simplefilter("ignore", CacheWarning)
                assert build(SOURCE, HOST).content == LIBRARY
        except NowhereToWrite as error:
            assert "No space left" in str(error) and "WARPLOOM_CACHE_DIR" in str(error)
            refused += 1
        end_process()
        assert_all_is_well(empty_cache, cache, places)
        if faulty.count < n:
            assert refused > 10
            return


@pytest.mark.some(1)
@named
def test_the_process_dies_at_each_file_operation(
    scenario: Scenario, cache: Path, places: Path
) -> None:
    for n in range(1, _LIMIT):
        prepare(scenario, cache)
        if not killed(scenario, n):
            assert n > _LEAST
            return
        assert_all_is_well(scenario, cache, places)
    raise AssertionError("more operations than expected")


def killed(scenario: Scenario, n: int) -> bool:
    """Whether a process that runs it died at its n-th operation."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            warnings.simplefilter("ignore", CacheWarning)
            faulty = FaultyOs(n, dying)
            with in_place(faulty):
                scenario()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status in (0, 9), status
    return status == 9


def end_process() -> None:
    while at_exit:
        work, arguments = at_exit.pop()
        work(*arguments)
