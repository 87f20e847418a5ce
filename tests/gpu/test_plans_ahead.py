"""Plans of the host on their way to a device that is behind, or beside another thread's capture."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.on_gpu import arguments

import warploom as wl
from warploom.runtime.strategies.host_strategy import HostStrategy

pytestmark = pytest.mark.gpu

PAGED = wl.Paged(16)
SHAPE: dict[str, Any] = {
    "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16", "kv_format": PAGED,
}  # fmt: skip
LONG = 100_000_000  # cycles that a stream is kept busy: about 50 ms


def batch(step: int, pages: Any) -> list[torch.Tensor]:
    """A chunk and decodes, of which each has a key more in each step, in other pages."""
    lengths = [(300, 1000 + step), *((1, 2000 + 100 * i + step) for i in range(20))]
    qo, kv, indices, last = arguments(lengths, PAGED, step)[:4]
    return [qo, kv, indices.to(pages), last]


def cache(cuda: Any) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, 5000, 16, 2, 128, dtype=torch.bfloat16, device=cuda)
    return k, v


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each plan that could have been made in few calls was."""
    told: list[bool] = []
    replan = HostStrategy.replan

    def asked(self: HostStrategy, *args: Any) -> Any:
        planned = replan(self, *args)
        told.append(planned is not None)
        return planned

    monkeypatch.setattr(HostStrategy, "replan", asked)
    return told


@pytest.mark.parametrize("pages", ["cpu", "cuda"])
def test_each_run_has_its_plan_however_far_behind_the_device_is(
    pages: str, cuda: Any, short: list[bool]
) -> None:
    """More plans than there are stages, none of which is written while a copy reads it."""
    attention, kv = wl.AttentionWrapper(wl.Causal(), **SHAPE, device=cuda), cache(cuda)
    batches = [batch(step, pages) for step in range(16)]
    q = torch.randn(320, 8, 128, dtype=torch.bfloat16, device=cuda)
    for given in batches[:3]:
        attention.plan(*given)
        attention.run(q, kv)
    torch.cuda.synchronize()
    found = []
    short.clear()
    torch.cuda._sleep(LONG)
    for given in batches:
        attention.plan(*given)
        found.append(attention.run(q, kv))
    assert short.count(True) >= 10  # of the others stages were too short
    torch.cuda.synchronize()
    for out, given in zip(found, batches, strict=True):
        fresh = wl.AttentionWrapper(wl.Causal(), **SHAPE, device=cuda)
        fresh.plan(*given)
        assert torch.equal(out, fresh.run(q, kv))


@pytest.mark.parametrize("pages", ["cpu", "cuda"])
def test_plans_leave_another_threads_capture_alone(
    pages: str, cuda: Any, short: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the mode in which torch captures, though they ask events and wait for them."""
    monkeypatch.setenv("WARPLOOM_VERIFY_PLANS", "0")  # to read a plan back waits for the device
    attention, kv = wl.AttentionWrapper(wl.Causal(), **SHAPE, device=cuda), cache(cuda)
    q = torch.randn(320, 8, 128, dtype=torch.bfloat16, device=cuda)
    batches = [batch(step, pages) for step in range(8)]
    results = [torch.empty_like(q) for _ in batches]
    for given in batches[:3]:
        attention.plan(*given)
        attention.run(q, kv, out=results[0])
    torch.cuda.synchronize()
    short.clear()
    graph, source, target = torch.cuda.CUDAGraph(), *torch.ones(2, 4, device=cuda)
    errors: list[BaseException] = []

    def plan_and_run() -> None:
        try:
            with torch.cuda.device(cuda):
                for given, out in zip(batches, results, strict=True):
                    attention.plan(*given)
                    attention.run(q, kv, out=out)
        except BaseException as error:
            errors.append(error)

    with torch.cuda.graph(graph):
        target.copy_(source * 3)
        other = threading.Thread(target=plan_and_run)
        other.start()
        other.join()
        target.add_(1)
    assert not errors and any(short)
    graph.replay()
    torch.cuda.synchronize()
    assert target.tolist() == [4.0] * 4
    for out, given in zip(results, batches, strict=True):
        fresh = wl.AttentionWrapper(wl.Causal(), **SHAPE, device=cuda)
        fresh.plan(*given)
        assert torch.equal(out, fresh.run(q, kv))
