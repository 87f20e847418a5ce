"""What warploom logs and counts, and that it is silent unless it is asked."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.preloaded import preloaded
from support.side_by_side import in_threads

import warploom as wl
from warploom import counters, env
from warploom.codegen import build as build_module
from warploom.codegen.build import build, forbid_compilation
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.codegen.source import KernelSource
from warploom.errors import (
    BadIndptr,
    BadSetting,
    CompileError,
    CompileForbidden,
    NoHostCompiler,
)
from warploom.notices import CopyWarning
from warploom.runtime.strategies import host_strategy

SOURCE = KernelSource("portable_Test", "int main() {}", "cpp")


@pytest.fixture(autouse=True)
def own_counts() -> Iterator[None]:
    """What other tests have done is not counted here, and is kept."""
    before = dataclasses.asdict(wl.reset_stats())
    yield
    for name, number in before.items():
        counters.count(name, number)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An instant compiler, an empty cache, and a process that has built nothing."""
    called: list[str] = []

    def run(source: KernelSource, target: Any, kept: Path) -> tuple[tuple[str, bytes], dict]:
        called.append(source.name)
        if "broken" in source.name:
            raise CompileError(compiler="c++", kernel=source.name, path=kept, log="1 error")
        return ("kernel.so", b"binary"), {"compile_seconds": 0.25}

    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build_module, "_run_compiler", run)
    monkeypatch.setattr(build_module, "_artifacts", {})
    return called


@pytest.fixture
def target() -> HostTarget:
    from warploom.codegen.compilers.hostcc import host_target

    try:
        return host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))


def test_a_kernel_is_missed_compiled_and_found_again(
    compiler: list[str], target: HostTarget, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG, "warploom")
    build(SOURCE, target)
    assert [record.getMessage() for record in caplog.records[:2]] == [
        f"cache miss: portable_Test in {tmp_path}", "compiling portable_Test",
    ]  # fmt: skip
    assert caplog.records[-1].getMessage().startswith("compiled portable_Test in 0.")
    found = wl.stats()
    assert (found.misses, found.compiles, found.disk_hits, found.memory_hits) == (1, 1, 0, 0)
    assert found.compile_seconds > 0
    build(SOURCE, target)
    assert wl.stats() == dataclasses.replace(found, memory_hits=1)
    build_module._artifacts.clear()
    caplog.clear()
    build(SOURCE, target)
    assert wl.stats() == dataclasses.replace(found, memory_hits=1, disk_hits=1)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"cache hit: portable_Test in {tmp_path}")
    assert record.levelno == logging.DEBUG
    assert compiler == ["portable_Test"]


def test_what_is_not_compiled_is_no_compile(compiler: list[str], target: HostTarget) -> None:
    broken = dataclasses.replace(SOURCE, name="broken")
    with pytest.raises(CompileError):
        build(broken, target)
    with forbid_compilation(), pytest.raises(CompileForbidden):
        build(SOURCE, target)
    assert wl.stats() == counters.Stats(misses=2)


def test_threads_lose_no_count(compiler: list[str], target: HostTarget) -> None:
    build(SOURCE, target)
    in_threads(lambda _: [build(SOURCE, target) for _ in range(50)], range(8))
    assert wl.stats().memory_hits == 400
    taken: list[counters.Stats] = []
    done = threading.Event()

    def take() -> None:
        while not done.is_set():
            taken.append(wl.reset_stats())

    taker = threading.Thread(target=take)
    taker.start()
    in_threads(lambda _: [counters.count("plans") for _ in range(2000)], range(4))
    done.set()
    taker.join()
    assert sum(x.plans for x in taken) + wl.stats().plans == 8000


def test_records_are_values() -> None:
    first = wl.stats()
    counters.count("plans")
    assert first == counters.Stats() and wl.stats() == counters.Stats(plans=1)
    assert wl.reset_stats() == counters.Stats(plans=1)
    assert wl.stats() == counters.Stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.plans = 3  # type: ignore[misc]


SHAPE: dict[str, Any] = {"num_q_heads": 2, "head_dim": 32, "dtype": "float32", "device": "cpu"}


@pytest.mark.parametrize("backend", [None, "reference"])
def test_plans_are_counted_and_summed_up(
    backend: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    wrapper = wl.AttentionWrapper(wl.Causal(), backend=backend, **SHAPE)
    caplog.set_level(logging.DEBUG, "warploom")
    wrapper.plan([0, 2, 5], [0, 10, 40])
    assert wl.stats().plans == 1
    line = caplog.records[-1].getMessage()
    assert line.startswith("planned Causal, Ragged(layout='NHD'): 2 requests, ")
    if backend is None:
        plan = wrapper.planned.plan  # type: ignore[union-attr]
        tile = plan.problem
        assert f"tile {tile.rows} x {tile.keys} (" in line
        assert f", {len(plan.items)} items, " in line and " bytes, by the host" in line
    with pytest.raises(BadIndptr):
        wrapper.plan([0, 2], [0, 10, 40])
    assert wl.stats().plans == 1


def test_copies_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    wrapper = wl.AttentionWrapper(**SHAPE)
    wrapper.plan([0, 3], [0, 3])
    k = torch.zeros(3, 2, 32)
    q = torch.zeros(3, 2, 64)[..., ::2]
    caplog.set_level(logging.DEBUG, "warploom")
    with pytest.warns(CopyWarning):
        for _ in range(2):
            wrapper.run(q, (k, k))
    assert wl.stats().copies == 2
    lines = [record.getMessage() for record in caplog.records]
    assert [x.startswith("copying q of shape (3, 2, 32): its last") for x in lines] == [True] * 2


def test_fallbacks_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise NoHostCompiler(tried="c++")

    monkeypatch.setattr(host_strategy, "HostPlanner", missing)
    caplog.set_level(logging.INFO, "warploom")
    wl.AttentionWrapper(wl.Causal(), **SHAPE).plan([0, 1], [0, 2])
    assert any(
        "no native planner, so NumPy plans: no C++" in x.getMessage() for x in caplog.records
    )


def test_runs_log_and_count_nothing(caplog: pytest.LogCaptureFixture) -> None:
    wrapper = wl.AttentionWrapper(**SHAPE)
    wrapper.plan([0, 3], [0, 3])
    q = torch.zeros(3, 2, 32)
    wrapper.run(q, (q, q))
    caplog.set_level(logging.DEBUG, "warploom")
    before = wl.stats()
    for _ in range(3):
        wrapper.run(q, (q, q))
    assert wl.stats() == before and caplog.records == []


SCRIPT = """
import logging, os, sys
os.environ["WARPLOOM_LOG"] = sys.argv[1]
root = logging.getLogger()
before = root.level, list(root.handlers)
import torch, warploom as wl
x = torch.zeros(1, 2, 1, 32)
wl.attention(x, x, x)
assert (root.level, list(root.handlers)) == before
"""


def test_stderr_has_what_the_variable_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WARPLOOM_LOG", raising=False)
    path, unset = tmp_path / "script.py", tmp_path / "unset.py"
    path.write_text(SCRIPT)
    unset.write_text(SCRIPT.replace('os.environ["WARPLOOM_LOG"] = sys.argv[1]', ""))
    with preloaded("torch", variables={"WARPLOOM_PROGRESS": "0"}) as runner:
        status, found = runner.run(path, tmp_path, " Debug ")
        assert status == 0 and "warploom DEBUG: planned Variant, Dense(" in found
        assert runner.run(path, tmp_path, "error") == (0, "")
        assert runner.run(unset, tmp_path) == (0, "")
        status, found = runner.run(path, tmp_path, "loud")
        assert status == 1
        assert "WARPLOOM_LOG is 'loud'; expected debug, info, warning, error" in found


def test_a_wrong_level_is_flagged_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_LOG", "loud")
    assert env.problem("WARPLOOM_LOG") == "refused: expected debug, info, warning, error"
    with pytest.raises(BadSetting, match="WARPLOOM_LOG"):
        env.log_level()
    for name, level in (("debug", logging.DEBUG), ("INFO", 20), ("warning", 30), ("error", 40)):
        monkeypatch.setenv("WARPLOOM_LOG", name)
        assert env.log_level() == level and env.problem("WARPLOOM_LOG") is None
