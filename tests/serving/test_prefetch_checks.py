"""What budgets, the model and the pass refuse, and what they say of one device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from torch.fx import symbolic_trace

from warploom import prefetch as face
from warploom.errors import ArgumentError
from warploom.prefetch import (
    H200,
    H200_OVERLAP,
    PAPER,
    Collective,
    Ring,
    SafeBudget,
    Serving,
    best_bytes,
    explore,
    predict,
    prefetch,
    prefetch_pass,
    speedup_by_link,
    with_l2,
)
from warploom.prefetch_errors import BudgetNotChosen, BudgetTooSmall

ANY: Any = H200_OVERLAP  # for arguments of another class
TEN: Any = 8


def layer() -> torch.fx.GraphModule:
    return symbolic_trace(torch.nn.Sequential(torch.nn.Linear(8, 8)))


def test_one_device_has_no_collective() -> None:
    ring = Ring(H200, 1)
    assert ring(Collective("_c10d_functional::all_reduce", 1 << 20)) == 0
    assert SafeBudget(H200_OVERLAP, ring).best(4e8, Collective())[0] == 0
    (alone,) = explore([PAPER], face.MODELS[:1], [Serving(1, 8, 2048)])
    assert alone.speedup == 1.0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Ring(H200, 0), "devices"),
        (lambda: Ring(H200, -3), "devices"),
        (lambda: Ring(ANY, 8), "chip.*such as H200"),
        (lambda: Serving(0, 8, 2048), "devices"),
        (lambda: Serving(1, -8, 2048), "batch"),
        (lambda: with_l2(PAPER, -5), "megabytes"),
        (lambda: predict(H200, -1e-5, 1e6, 1e6), "collective.*seconds"),
        (lambda: SafeBudget(H200_OVERLAP, 10), "seconds.*10 us are 10e-6"),
        (lambda: H200_OVERLAP.best(inf, 1e8), "seconds"),
        (lambda: H200_OVERLAP.best(10, 1e8), "10 us are 10e-6"),
        (lambda: best_bytes(H200, 10, 1e8), "10 us are 10e-6"),
        (lambda: SafeBudget(H200_OVERLAP, 1e-5, sms=TEN), r"sms.*\(8,\)"),
        (lambda: H200_OVERLAP.saved(1e-5, 1e8, 1e6, 0), "sms"),
        (lambda: H200_OVERLAP.for_reader([ANY]), "timed.*Timed"),
        (lambda: best_bytes(ANY, 1e-5, 1e8), "chip.*Accelerator"),
        (lambda: speedup_by_link(0), "gigabits"),
        (lambda: explore(PAPER), "list"),  # type: ignore[arg-type]
        (lambda: prefetch_pass(torch.nn.ReLU(), 1000), "symbolic_trace"),  # type: ignore[arg-type]
        (lambda: prefetch_pass(layer(), 1000, collectives=[TEN]), "vllm::all_reduce"),
    ],
)
def test_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        call()


def test_budgets_that_bring_nothing_or_are_not_bytes() -> None:
    for size in (0, 127):
        with pytest.raises(BudgetTooSmall, match="128"):
            prefetch_pass(layer(), size)
    budget: Any = SafeBudget(H200_OVERLAP, 1e-5)
    with pytest.raises(BudgetNotChosen, match=r"budget\.best\(bytes\)\[0\]") as told:
        prefetch(torch.ones(64), budget)
    assert "Overlap(" not in str(told.value)
    assert prefetch(torch.ones(64), 2**70) == 256


def test_collectives_that_are_absent_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    module = symbolic_trace(Product())
    with caplog.at_level(logging.WARNING, "warploom"):
        for _ in range(2):
            prefetch_pass(module, 1000, collectives=["mistyped::all_reduce"])
    (record,) = caplog.records
    assert "mistyped::all_reduce" in record.getMessage() and "aten::mm" in record.getMessage()


class Product(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)
