"""From source to artifact: memory, disk, compiler; in threads, in processes, and on bad days."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from support.side_by_side import in_threads

from warploom.codegen import build as build_module
from warploom.codegen.build import build, build_all, forbid_compilation
from warploom.codegen.cache import store as store_module
from warploom.codegen.cache.folder import Folder
from warploom.codegen.cache.key import Target
from warploom.codegen.compilers.arch import ARCHS, Arch
from warploom.codegen.compilers.hostcc import HostTarget, host_target
from warploom.codegen.source import KernelSource
from warploom.errors import (
    BuildFailed,
    CacheWarning,
    CompileError,
    CompileForbidden,
    NoHostCompiler,
    WarploomError,
)

Make = Callable[..., KernelSource]


@pytest.fixture(autouse=True)
def fresh_process(cache: Path) -> Iterator[None]:
    """As if this process had built nothing yet."""
    build_module._artifacts.clear()
    yield
    build_module._artifacts.clear()


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the host compiler by one that is instant; the names it was called for."""
    called: list[str] = []

    def run(source: KernelSource, target: Target, kept: Path) -> tuple[tuple[str, bytes], dict]:
        called.append(source.name)
        if "broken" in source.name:
            raise CompileError(compiler="c++", kernel=source.name, path=kept, log="1 error")
        return ("kernel.so", source.text.encode()), {"compile_seconds": 0.1}

    monkeypatch.setattr(build_module, "_run_compiler", run)
    return called


@pytest.fixture
def host() -> HostTarget:
    try:
        return host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))


def call(path: Path) -> int:
    return ctypes.CDLL(str(path)).warploom_kernel()


def test_a_host_kernel_is_built_once_and_runs(cpp_source: Make, host: HostTarget) -> None:
    first = build(cpp_source("41 + 1"), host)
    assert first.compiled and call(first.path) == 42
    assert first.source_path.name == "kernel.cpp" and first.resources is None
    assert build(cpp_source("41 + 1"), host) is first
    build_module._artifacts.clear()
    again = build(cpp_source("41 + 1"), host)
    assert not again.compiled and again.path == first.path
    assert again.compile_seconds == first.compile_seconds > 0


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
def test_a_cuda_kernel_brings_its_resources(cuda_source: Make) -> None:
    first = build(cuda_source(), ARCHS["sm_90a"])
    build_module._artifacts.clear()
    again = build(cuda_source(), ARCHS["sm_90a"])
    assert again.path.suffix == ".cubin" and not again.compiled
    assert again.resources == first.resources
    assert first.resources is not None
    assert first.resources.registers > 0 and first.resources.spill_bytes == 0
    other = build(cuda_source(), ARCHS["sm_80"])
    assert other.compiled and other.path != first.path


def test_a_hit_loads_no_compiler(cuda_source: Make, toolchain: object, cache: Path) -> None:
    build(cuda_source(), ARCHS["sm_90a"])
    code = f"""
import sys
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.build import build
from warploom.codegen.source import KernelSource
assert not build(KernelSource("scale", {cuda_source().text!r}, "cuda"), ARCHS["sm_90a"]).compiled
heavy = {{"torch", "rich", "warploom.codegen.compilers.nvrtc", "cuda.bindings", "jinja2"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    environment = {**os.environ, "WARPLOOM_FORBID_COMPILE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/", env=environment)


def test_a_warm_load_takes_at_most_50_ms(cpp_source: Make, compiles: list[str]) -> None:
    host = host_target()
    build(cpp_source(), host)
    times = []
    for _ in range(5):
        build_module._artifacts.clear()
        begin = time.perf_counter()
        build(cpp_source(), host)
        times.append(time.perf_counter() - begin)
    assert statistics.median(times) < 0.05
    assert len(compiles) == 1


def test_threads_share_one_compile(
    cpp_source: Make, host: HostTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def slow(source: KernelSource, target: Target, kept: Path) -> tuple[tuple[str, bytes], dict]:
        calls.append(source.name)
        time.sleep(0.2)
        return ("kernel.so", b"library"), {"compile_seconds": 0.2}

    monkeypatch.setattr(build_module, "_run_compiler", slow)
    artifacts = []

    in_threads(lambda _: artifacts.append(build(cpp_source(), host)), range(4))
    assert len(calls) == 1 and len({artifact.path for artifact in artifacts}) == 1


def test_processes_race_for_one_kernel(cpp_source: Make, host: HostTarget, cache: Path) -> None:
    code = f"""
import ctypes
from warploom.codegen.build import build
from warploom.codegen.compilers.hostcc import HostTarget, host_target
from warploom.codegen.source import KernelSource
for i in range(2):
    text = {cpp_source("VALUE").text!r}.replace("VALUE", str(i))
    path = build(KernelSource("raced", text, "cpp"), host_target()).path
    assert ctypes.CDLL(str(path)).warploom_kernel() == i
"""
    racers = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", code], cwd="/") for _ in range(3)
    ]
    assert [racer.wait(120) for racer in racers] == [0, 0, 0]
    assert len(list((cache / "kernels").iterdir())) == 2


def test_a_failure_names_the_kept_source_and_is_not_remembered(
    cpp_source: Make, host: HostTarget, cache: Path
) -> None:
    with pytest.raises(CompileError) as caught:
        build(cpp_source("oops", name="cpu_Oops"), host)
    kept = Path(str(caught.value.facts["path"]))
    assert kept.is_relative_to(cache / "failed") and "oops" in kept.read_text()
    assert f"{kept}:2" in str(caught.value) and "cpu_Oops" in str(caught.value)
    assert list((cache / "kernels").iterdir()) == []
    with pytest.raises(CompileError):
        build(cpp_source("oops", name="cpu_Oops"), host)


def test_a_damaged_library_is_built_again(cpp_source: Make, host: HostTarget) -> None:
    path = build(cpp_source("7"), host).path
    path.write_bytes(path.read_bytes()[:100])
    build_module._artifacts.clear()
    with pytest.warns(CacheWarning, match="kernel.so"):
        again = build(cpp_source("7"), host)
    assert again.compiled and call(again.path) == 7


def test_a_kernel_cleared_away_is_built_again(
    cpp_source: Make, host: HostTarget, compiles: list[str]
) -> None:
    build(cpp_source(), host).path.unlink()
    with pytest.warns(CacheWarning, match="kernel.so"):
        assert build(cpp_source(), host).path.exists()
    assert len(compiles) == 2


def refuse_writing(monkeypatch: pytest.MonkeyPatch, cache: Path, error: OSError) -> None:
    real = store_module._publish

    def publish(parent: Folder, name: str, files: Mapping[str, bytes]) -> None:
        if parent.path.is_relative_to(cache):
            raise error
        real(parent, name, files)

    monkeypatch.setattr(store_module, "_publish", publish)
    build_module._warn_unwritable.cache_clear()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EROFS, "Read-only file system"),
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EACCES, "Permission denied"),
    ],
    ids=lambda error: errno.errorcode[error.errno],
)
def test_an_unwritable_cache_is_survived_with_one_warning(
    cpp_source: Make,
    host: HostTarget,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiles: list[str],
    error: OSError,
) -> None:
    refuse_writing(monkeypatch, cache, error)
    with pytest.warns(CacheWarning, match="cannot be written") as caught:
        artifacts = [build(cpp_source(str(i)), host) for i in range(3)]
    assert len(caught) == 1 and str(error.strerror) in str(caught[0].message)
    assert all(artifact.path.exists() for artifact in artifacts)
    assert not any(artifact.path.is_relative_to(cache) for artifact in artifacts)
    assert build(cpp_source("0"), host) is artifacts[0]


def test_a_cache_folder_that_cannot_exist_is_survived(
    cpp_source: Make, host: HostTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(CacheWarning, match="WARPLOOM_CACHE_DIR"):
        assert call(build(cpp_source("3"), host).path) == 3


def test_the_spare_folder_is_private(cpp_source: Make) -> None:
    assert os.stat(store_module.spare_store().root).st_mode & 0o777 == 0o700


def test_forbidding_allows_hits_and_refuses_the_rest(
    cpp_source: Make, host: HostTarget, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(cpp_source("1"), host)
    build_module._artifacts.clear()
    with forbid_compilation("under CUDA graph capture"):
        assert not build(cpp_source("1"), host).compiled
        with pytest.raises(CompileForbidden, match=r"answer.*under CUDA graph capture"):
            build(cpp_source("2"), host)
        with pytest.raises(CompileForbidden):
            build_all([(cpp_source("3"), host)])
        build_elsewhere = threading.Thread(target=build, args=(cpp_source("4"), host))
        build_elsewhere.start()
        build_elsewhere.join()
    assert build(cpp_source("4"), host).path.exists()
    assert build(cpp_source("2"), host).compiled
    monkeypatch.setenv("WARPLOOM_FORBID_COMPILE", "1")
    with pytest.raises(CompileForbidden, match="WARPLOOM_FORBID_COMPILE"):
        build(cpp_source("5"), host)
    assert len(compiles) == 3


def test_many_are_built_in_order_and_once_each(
    cpp_source: Make, host: HostTarget, compiles: list[str]
) -> None:
    jobs = [(cpp_source(str(i % 3), name=f"k{i % 3}"), host) for i in range(9)]
    artifacts = build_all(jobs)
    assert [artifact.path.parent.name[:2] for artifact in artifacts] == ["k0", "k1", "k2"] * 3
    assert sorted(compiles) == ["k0", "k1", "k2"]
    assert build_all([]) == []


def test_failures_are_gathered_and_the_rest_is_built(
    cpp_source: Make, host: HostTarget, compiles: list[str]
) -> None:
    names = ["good", "broken_one", "fine", "broken_two"]
    jobs = [(cpp_source(str(i), name=name), host) for i, name in enumerate(names)]
    with pytest.raises(BuildFailed, match="2 of 4 kernels") as caught:
        build_all(jobs)
    assert "broken_one" in str(caught.value) and "broken_two" in str(caught.value)
    assert isinstance(caught.value.__cause__, CompileError)
    assert not build(*jobs[0]).path.parent.name.startswith("broken")
    assert compiles.count("good") == 1
    with pytest.raises(CompileError, match="broken_one"):
        build_all(jobs[:3])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, WarploomError) and str(copy) == str(caught.value)


@pytest.mark.parametrize(
    ("setting", "argument", "shown"),
    [("1", None, True), ("0", None, False), (None, None, False), ("0", True, True)],
)
def test_the_progress_bar_obeys_argument_setting_and_terminal(
    cpp_source: Make,
    host: HostTarget,
    compiles: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    setting: str | None,
    argument: bool | None,
    shown: bool,
) -> None:
    monkeypatch.setattr(build_module, "_PATIENCE_SECONDS", 0.0)
    quick = build_module._run_compiler

    def slow(
        source: KernelSource, target: Arch | HostTarget, kept: Path
    ) -> tuple[tuple[str, bytes], dict]:
        time.sleep(0.1)
        return quick(source, target, kept)

    monkeypatch.setattr(build_module, "_run_compiler", slow)
    monkeypatch.delenv("WARPLOOM_PROGRESS", raising=False)
    if setting is not None:
        monkeypatch.setenv("WARPLOOM_PROGRESS", setting)
    build_all([(cpp_source(str(i)), host) for i in range(3)], progress=argument)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("3/3" in captured.err) == shown
    if setting is argument is None:  # where nobody decides, and no terminal is
        assert captured.err == "warploom: compiling 3 kernels\n"
        build_all([(cpp_source("one"), host)])
        assert capsys.readouterr().err == "warploom: compiling 1 kernel\n"


def test_hits_show_no_progress_bar(
    cpp_source: Make, host: HostTarget, compiles: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    build_all([(cpp_source(str(i)), host) for i in range(3)], progress=True)
    assert capsys.readouterr().err == ""


def test_an_interrupt_ends_what_is_queued(
    cpp_source: Make, host: HostTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def slow(source: KernelSource, target: Target, kept: Path) -> tuple[tuple[str, bytes], dict]:
        started.append(source.name)
        time.sleep(0.2)
        return ("kernel.so", b"library"), {"compile_seconds": 0.2}

    def interrupt(*_: object) -> None:
        time.sleep(0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr(build_module, "_run_compiler", slow)
    monkeypatch.setattr(build_module, "_wait", interrupt)
    monkeypatch.setenv("WARPLOOM_BUILD_JOBS", "1")
    with pytest.raises(KeyboardInterrupt):
        build_all([(cpp_source(str(i)), host) for i in range(9)])
    assert len(started) <= 2


def test_a_refusal_is_that_of_the_thread_that_may_not_compile(
    cpp_source: Make, host: HostTarget, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = cpp_source("41 + 1")
    looked, go_on = threading.Event(), threading.Event()
    load = build_module._load

    def slow(*args: object) -> object:
        looked.set()
        go_on.wait(10)
        return load(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(build_module, "_load", slow)
    found: dict[str, object] = {}

    def serving() -> None:
        try:
            with forbid_compilation():
                build(source, host)
        except CompileForbidden as error:
            found["serving"] = error

    def warming() -> None:
        looked.wait(10)
        threading.Timer(0.2, go_on.set).start()
        found["warming"] = build(source, host)

    in_threads(lambda work: work(), [serving, warming])
    assert isinstance(found["serving"], CompileForbidden)
    assert found["warming"].compiled  # type: ignore[attr-defined]
    assert len(compiles) == 1
