"""Processes that are killed while they build, and processes side by side."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warploom.codegen import build as build_module
from warploom.codegen.build import build
from warploom.codegen.compilers import headers, hostcc
from warploom.codegen.compilers.hostcc import HostTarget, host_target
from warploom.codegen.source import KernelSource
from warploom.errors import NoHostCompiler

Make = Callable[..., KernelSource]


@pytest.fixture(autouse=True)
def fresh_process(cache: Path) -> Iterator[None]:
    build_module._artifacts.clear()
    yield
    build_module._artifacts.clear()
    hostcc._probe.cache_clear()
    headers.header_digest.cache_clear()


@pytest.fixture
def host() -> HostTarget:
    hostcc._probe.cache_clear()
    try:
        return host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


def until(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


BUILD = """
import sys
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.build import build
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.source import KernelSource
from warploom.runtime.devices.library import load_library
text, language = sys.argv[1:]
target = host_target() if language == "cpp" else ARCHS["sm_90a"]
artifact = build(KernelSource("killed", text, language), target)
print(load_library(artifact).warploom_kernel() if language == "cpp" else len(artifact.content))
"""


def building(text: str, language: str, temporary: Path, **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(temporary), **more}
    command = [sys.executable, "-W", "error", "-c", BUILD, text, language]
    return subprocess.Popen(
        command, cwd="/", env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


# waits where the test says, so that the process can be killed there, and leaves a file of its own
SLOW = """#!/bin/sh
case "$*" in
  *kernel.cpp*)
    : > "$TMPDIR/cc.s"
    echo $$ > "{at}/before"; while [ ! -e "{at}/go" ]; do sleep 0.02; done
    "{real}" "$@"; status=$?
    echo $$ > "{at}/after"; while [ ! -e "{at}/end" ]; do sleep 0.02; done
    exit $status;;
esac
exec "{real}" "$@"
"""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("writable", [True, False])
def test_a_process_killed_while_the_compiler_runs_leaves_nothing(
    cpp_source: Make,
    host: HostTarget,
    cache: Path,
    temporary: Path,
    tmp_path: Path,
    moment: str,
    writable: bool,
) -> None:
    text, at = cpp_source("41 + 1").text, tmp_path / "signs"
    at.mkdir()
    real, slow = shutil.which(host.command[0]), tmp_path / "slow-c++"
    slow.write_text(SLOW.format(at=at, real=real))
    slow.chmod(0o755)
    if not writable:
        (tmp_path / "file").touch()
    place = {} if writable else {"WARPLOOM_CACHE_DIR": str(tmp_path / "file" / "cache")}
    killed = building(text, "cpp", temporary, CXX=str(slow), **place)
    if moment == "after":
        (at / "go").touch()
    until((at / moment).exists)
    os.kill(killed.pid, signal.SIGKILL)  # but not the compiler
    killed.wait()
    for sign in ("go", "end"):
        (at / sign).touch()
    until(lambda: not running(int((at / moment).read_text())))
    following = building(text, "cpp", temporary)
    assert following.communicate()[0] == "42\n"
    assert list(temporary.iterdir()) == []
    (entry,) = (cache / "kernels").iterdir()
    assert entry.name.startswith("killed-")


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


CUDA = """
#include <cute/numeric/integral_constant.hpp>
extern "C" __global__ void warploom_kernel(int* x) { *x = cute::Int<42>::value; }
"""


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
def test_a_process_killed_while_nvrtc_makes_an_image_leaves_nothing(
    cache: Path, temporary: Path
) -> None:
    killed = building(CUDA, "cuda", temporary)
    images = cache / "pch"
    until(lambda: list(images.glob(".draft-*.pch")))
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert list(images.iterdir()) != []
    following = building(CUDA, "cuda", temporary)
    assert int(following.communicate()[0]) > 1000
    assert list(temporary.iterdir()) == []
    assert [path.suffix for path in images.iterdir()] == [".pch"]
    assert [path.name[:7] for path in (cache / "kernels").iterdir()] == ["killed-"]


POOL = """
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from warploom.codegen.build import build
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.source import KernelSource
from warploom.runtime.devices.library import load_library

def answer(i):
    text = sys.argv[1].replace("VALUE", str(i % 3))
    return load_library(build(KernelSource("pooled", text, "cpp"), host_target())).warploom_kernel()

if __name__ == "__main__":
    with ThreadPoolExecutor(3) as threads:  # at work when processes are forked
        at_work = [threads.submit(answer, i) for i in range(6)]
        with ProcessPoolExecutor(3, get_context(sys.argv[2])) as processes:
            assert list(processes.map(answer, range(9), timeout=100)) == [0, 1, 2] * 3
        assert [future.result() for future in at_work] == [0, 1, 2] * 2
"""


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_pools_of_processes_build_side_by_side(
    cpp_source: Make, cache: Path, temporary: Path, tmp_path: Path, method: str
) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    command = [sys.executable, str(script), cpp_source("VALUE").text, method]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run(command, check=True, timeout=200, env=environment)
    assert len(list((cache / "kernels").iterdir())) == 3
    assert list(temporary.iterdir()) == []


def test_two_versions_of_the_headers_live_side_by_side(
    tmp_path: Path, host: HostTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = tmp_path / "templates"
    shutil.copytree(headers._TEMPLATES, templates)
    header = templates / "common" / "warploom" / "version.hpp"
    for module in (headers, hostcc):
        monkeypatch.setattr(module, "_TEMPLATES", templates)
    text = """
#include <warploom/version.hpp>
extern "C" __attribute__((visibility("default"))) int warploom_kernel() { return VERSION; }
"""

    def built(version: int) -> tuple[bool, Path, bytes]:
        header.write_text(f"#define VERSION {version}\n")
        headers.header_digest.cache_clear()
        build_module._artifacts.clear()
        artifact = build(KernelSource("versions", text, "cpp"), host)
        return artifact.compiled, artifact.path, artifact.content

    old, new = built(1), built(2)
    assert old[0] and new[0] and old[1] != new[1] and old[2] != new[2]
    assert built(1) == (False, *old[1:])
    assert built(2) == (False, *new[1:])
