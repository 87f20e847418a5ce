"""Threads of the CPU back end follow torch, and WARPLOOM_THREADS before it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warploom.runtime.cpu import CTAS_PER_THREAD, CpuKernel, default_num_ctas


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A number of threads that torch has been told to use."""
    monkeypatch.delenv("WARPLOOM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def used_by_a_run() -> int:
    kernel, seen = CpuKernel.__new__(CpuKernel), []

    def entry(address: int, num_ctas: int, num_threads: int) -> int:
        seen.append(num_threads)
        return 0

    kernel._function = entry  # type: ignore[assignment]
    params: Any = SimpleNamespace(address=0)
    kernel.launch(params, num_ctas=8)
    return seen[0]


def test_plans_and_runs_use_as_many_as_torch(threads: int) -> None:
    assert default_num_ctas() == threads * CTAS_PER_THREAD
    assert used_by_a_run() == threads


def test_the_environment_comes_first(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_THREADS", "2")
    assert default_num_ctas() == 2 * CTAS_PER_THREAD
    assert used_by_a_run() == 2
