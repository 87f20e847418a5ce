"""The benchmark of compile times measures what it says."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from warploom.codegen.compilers.hostcc import host_target
from warploom.errors import NoHostCompiler

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def compile_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "unused"))
    return import_module("compile_time")


def test_a_load_from_disk_compiles_nothing_and_is_quick(
    compile_time: ModuleType, tmp_path: Path
) -> None:
    try:
        host = host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))
    report = sys.modules["harness"].Report("compile_time", torch.device("cpu"), tmp_path)
    compile_time.host_rows(report, host, samples=1)
    cold, load = report.rows
    assert (cold.impl, load.impl, cold.unit) == ("cold", "load", "ms")
    assert load.ms < cold.ms and load.samples == 2


def test_every_cache_of_the_benchmark_is_its_own(compile_time: ModuleType) -> None:
    with compile_time.empty_cache() as folder:
        assert os.environ["WARPLOOM_CACHE_DIR"] == str(folder)
        assert list(folder.iterdir()) == []
    assert not folder.exists() and "unused" in os.environ["WARPLOOM_CACHE_DIR"]


def test_the_kernels_it_compiles_are_what_users_get(compile_time: ModuleType) -> None:
    from warploom.codegen.attention.templates import render_cuda
    from warploom.scheduler.model.layout import c_structs

    for tile in compile_time.CUDA_TILES:
        source = render_cuda(compile_time.gemma_like(), tile, c_structs())
        assert "SoftCap" in source.name and source.text.lstrip().startswith("//")
