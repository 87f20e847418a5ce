"""Tests that need a GPU are skipped without one; a whole run writes `verified.json`."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent


def load_record() -> ModuleType:
    """`record.py` next door, which no package holds."""
    spec = importlib.util.spec_from_file_location("warploom_gpu_record", HERE / "record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recorder:
    """Counts the outcomes of GPU tests, and records them if none was left out."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.ids: set[str] = set()
        self.begin = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.ids = {item.nodeid for item in session.items if item.get_closest_marker("gpu")}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self.ids:
            return
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self.outcomes[report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.outcomes["passed"] and is_whole(session.config):
            load_record().write(dict(self.outcomes), time.monotonic() - self.begin)


def is_whole(config: pytest.Config) -> bool:
    """True if the command line chose no tests but by `-m gpu`, and this is no worker of many."""
    narrowed = config.option.keyword or getattr(config.option, "lf", False)
    files = [arg for arg in config.args if "::" in arg or Path(arg).suffix == ".py"]
    return not narrowed and not files and not hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():
        config.pluginmanager.register(Recorder(), "warploom-gpu-recorder")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def cuda() -> Any:
    """The current CUDA device; seeds are set."""
    torch.manual_seed(0)
    return torch.device("cuda", torch.cuda.current_device())
