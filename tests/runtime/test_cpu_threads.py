"""Threads of the CPU back end follow torch, and WARPLOOM_THREADS before it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warploom.codegen.build import build
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.codegen.source import KernelSource
from warploom.dsl.types.formats import Ragged
from warploom.runtime.devices.cpu import CTAS_PER_THREAD, CpuKernel, default_num_ctas
from warploom.runtime.wrappers.wrapper import AttentionWrapper


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A number of threads that torch has been told to use."""
    monkeypatch.delenv("WARPLOOM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


TELLS_ITS_THREADS = """
extern "C" __attribute__((visibility("default")))
int warploom_kernel(int* params, int, int num_threads) { return (*params = num_threads), 0; }
"""


@pytest.fixture(scope="module")
def kernel(host: HostTarget) -> CpuKernel:
    """A kernel that writes to its parameters how many threads it was given."""
    source = KernelSource("tells its threads", TELLS_ITS_THREADS, "cpp")
    return CpuKernel(source.name, build(source, host))


def used_by_a_run(kernel: CpuKernel) -> int:
    seen = ctypes.c_int(0)
    params: Any = SimpleNamespace(address=ctypes.addressof(seen))
    kernel.launch(params, num_ctas=8)
    return seen.value


def test_plans_and_runs_use_as_many_as_torch(threads: int, kernel: CpuKernel) -> None:
    assert default_num_ctas() == threads * CTAS_PER_THREAD
    assert used_by_a_run(kernel) == threads


def test_the_environment_comes_first(
    threads: int, kernel: CpuKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPLOOM_THREADS", "2")
    assert default_num_ctas() == 2 * CTAS_PER_THREAD
    assert used_by_a_run(kernel) == 2


def make(**options: Any) -> AttentionWrapper:
    shape: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 8, "head_dim": 64}
    return AttentionWrapper(kv_format=Ragged(), **shape, dtype="float32", device="cpu", **options)


def test_kernels_that_are_loaded_get_the_grid_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads in (1, 5, 2):
        monkeypatch.setenv("WARPLOOM_THREADS", str(threads))
        attention = make()
        attention.plan([0, 10], [0, 100])
        assert attention.planned is not None
        assert attention.planned.plan.problem.num_ctas == threads * CTAS_PER_THREAD


def test_a_limit_of_one_cta_leaves_all_work_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_THREADS", "2")
    attention = make(sm_limit=1)
    rows, keys = 256, 1024
    attention.plan([0, rows], [0, keys])
    q, k, v = torch.randn(rows, 8, 64), torch.randn(keys, 8, 64), torch.randn(keys, 8, 64)
    attention.run(q, (k, v))
    own, all_threads = -time.thread_time(), -time.process_time()
    for _ in range(25):  # the test runner has a thread that does a little, too
        attention.run(q, (k, v))
    own, all_threads = own + time.thread_time(), all_threads + time.process_time()
    assert own > 0.9 * all_threads
