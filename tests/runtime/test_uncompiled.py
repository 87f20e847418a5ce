"""What torch.compile goes around, and says so where it may not: plans and appends."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import warploom as wl
from warploom.dsl.values.stand_ins import uncompiled

TABLE = [0, 1, 3], [0, 1, 2], [2, 3], [4, 5]
NEW = torch.arange(3 * 2 * 16.0).reshape(3, 2, 16)


def written() -> torch.Tensor:
    cache = torch.zeros(4, 2, 16, 2, 16)
    cache[2, :, 3] = NEW[0]
    cache[3, :, 3:5] = NEW[1:]
    return cache


def appending(kind: str, cache: torch.Tensor) -> Any:
    made = wl.Appender(
        kv_format=wl.Paged(16), num_kv_heads=2, head_dim=16, dtype="float32", device="cpu"
    )
    append = made if kind == "Appender" else wl.append

    def step(k: torch.Tensor) -> torch.Tensor:
        append(k, k, cache, *TABLE)
        return k + 1

    return step


@pytest.mark.parametrize("kind", ["Appender", "append"])
def test_a_compiled_step_appends_at_each_call(kind: str) -> None:
    torch.compiler.reset()
    cache = torch.zeros(4, 2, 16, 2, 16)
    step = torch.compile(appending(kind, cache), backend="eager")
    for _ in range(2):
        cache.zero_()
        assert torch.equal(step(NEW), NEW + 1)
        assert torch.equal(cache, written())


@pytest.mark.parametrize("kind", ["Appender", "append"])
def test_no_single_graph_holds_an_append(kind: str) -> None:
    torch.compiler.reset()
    step = torch.compile(appending(kind, written()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="call it outside of the compiled function"):
        step(NEW)


def test_a_compiled_step_plans_at_each_call() -> None:
    torch.compiler.reset()
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(16), num_q_heads=2, head_dim=16, dtype="float32",
        device="cpu",
    )  # fmt: skip

    def step(q: torch.Tensor) -> torch.Tensor:
        attention.plan(*TABLE)
        return attention.run(q, written())

    expected, before = step(NEW), wl.stats().plans
    compiled = torch.compile(step, backend="eager")
    assert torch.equal(compiled(NEW), expected)
    assert torch.equal(compiled(NEW), expected)
    assert wl.stats().plans == before + 2
    torch.compiler.reset()
    with pytest.raises(Exception, match="planned outside of the compiled function"):
        torch.compile(step, backend="eager", fullgraph=True)(NEW)


def test_others_may_be_importing_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they are done, the module lacks its functions."""

    @uncompiled("it is a test")
    def call(x: int) -> int:
        return x + 1

    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    assert call(1) == 2
    monkeypatch.undo()
    assert call(2) == 3
