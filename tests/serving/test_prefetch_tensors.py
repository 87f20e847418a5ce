"""`prefetch` of tensors: what it asks for, what it refuses, and that graphs keep it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from support.holds import FakeHold, destroy_graphs

import warploom as wl
from warploom.errors import ArgumentError, ForbiddenUnderCapture, UnsupportedSpec, WrongDevice
from warploom.prefetch import (
    H200_OVERLAP,
    SafeBudget,
    beside,
    beside_pages,
    inductor_pass,
    prefetch,
    prefetch_pass,
)
from warploom.prefetch_errors import BadBudget, BudgetTooSmall, HasGaps
from warploom.runtime.devices import graph_hold
from warploom.serving.prefetch import tensors as module
from warploom.serving.prefetch.operators import join_prefetch_op, prefetch_op


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No tensors were met before."""
    made = module._Tables()
    monkeypatch.setattr(module, "_tables", made)
    monkeypatch.setattr(graph_hold, "GraphHold", FakeHold)
    return made


def asked(tables: Any) -> list[tuple[int, int]]:
    """(address, bytes) of the last table, neighbours joined."""
    records = list(tables._known.values())[-1].read()
    found: list[tuple[int, int]] = []
    for offset, size in zip(records["offset"].tolist(), records["bytes"].tolist(), strict=True):
        if found and sum(found[-1]) == offset:
            offset, size = found[-1][0], found.pop()[1] + size
        found.append((offset, size))
    return found


def test_tensors_in_their_order_up_to_the_budget(tables: Any) -> None:
    a, b, c = torch.randn(300, 100), torch.randn(50, 64).t(), torch.randn(7)
    sizes = [120_000, 12_800, 28]
    assert prefetch([a, b, c], 1 << 20) == sum(sizes)
    expected = list(zip((x.data_ptr() for x in (a, b, c)), sizes, strict=True))
    assert asked(tables) == expected
    assert prefetch([a, b, c], 125_000) == 125_000
    assert asked(tables) == [expected[0], (b.data_ptr(), 5_000)]
    assert prefetch(c, 1000) == 28  # one tensor


def test_large_tensors_are_kept_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    real = module.prefetcher

    def noted(device: torch.device, sms: int, keep: bool) -> Any:
        made.append(keep)
        return real(device, sms, keep)

    monkeypatch.setattr(module, "prefetcher", noted)
    small, large = torch.zeros(100, 50), torch.zeros(100, 51)
    prefetch([small, large], 1 << 20)
    monkeypatch.setattr(module, "_kept", lambda device: small.nbytes)
    prefetch([small, large], 1 << 20)
    prefetch([small, large], small.nbytes)  # the large one is not asked for
    prefetch(large, 1000)
    prefetch(large, 1000, keep=False)
    prefetch(small, 1000, keep=True)
    with beside(large, 1000), beside(small, 1000):
        pass
    prefetch_op(small, [large], 1000, 8, False, False)
    prefetch_op(small, [large], 1000, 8, False)
    assert made == [False, True, False, True, False, True, True, False, False, True]


def test_values_stay() -> None:
    x = torch.randn(1000)
    before = x.clone()
    with beside([x], 4096) as size:
        assert size == 4000
    assert torch.equal(x, before)


def test_beside_takes_what_prefetch_takes(tables: Any) -> None:
    array = np.ones((64, 64), "f4")
    for given in (array, [array], (torch.from_numpy(array),)):
        with beside(given, 1 << 20) as size:
            assert size == 4 * 64 * 64
        assert asked(tables) == [(array.ctypes.data, size)]
    with pytest.raises(ArgumentError, match="__dlpack__"), beside([1], 4096):
        pass
    with pytest.raises(ArgumentError, match="empty"), beside([], 4096):
        pass


def test_beside_pages_takes_arrays() -> None:
    attention = wl.AttentionWrapper(
        kv_format=wl.Paged(4), num_q_heads=2, num_kv_heads=2, head_dim=8, dtype="float32",
        device="cpu",
    )  # fmt: skip
    attention.plan([0, 1], [0, 2], [3, 1], [4])
    cache = np.ones((5, 2, 4, 2, 8), "f4")
    for kv in (cache, (cache[:, 0], cache[:, 1]), torch.from_numpy(cache)):
        with beside_pages(attention, kv, 1 << 20) as size:
            assert size == 2 * cache[0].nbytes


def test_known_tensors_write_no_table(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(100), torch.randn(100)
    prefetch(x, 1000)
    (first,) = tables._known.values()
    monkeypatch.setattr(module, "is_capturing", lambda device: True)
    prefetch(x, 1000)
    assert list(tables._of_graphs) == [first]
    with pytest.raises(ForbiddenUnderCapture, match="before the capture"):
        prefetch(y, 1000)


def test_old_tables_go_but_not_those_of_graphs(
    tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once their graphs are gone, these go as well."""
    monkeypatch.setattr(module, "_MOST_TABLES", 3)
    kept = [torch.randn(100) for _ in range(5)]
    prefetch(kept[0], 1000)
    with monkeypatch.context() as patch:
        patch.setattr(module, "is_capturing", lambda device: True)
        prefetch(kept[0], 1000)
    for x in kept[1:]:
        prefetch(x, 1000)
    (captured,) = tables._of_graphs
    assert len(tables._known) == 4 and captured in tables._known.values()
    destroy_graphs(tables._of_graphs)
    prefetch(torch.randn(100), 1000)
    assert len(tables._known) == 3 and captured not in tables._known.values()
    assert not list(tables._of_graphs)


@pytest.mark.parametrize("wrong", [-1, 2.5, "1", True, None])
def test_no_budgets(wrong: Any) -> None:
    with pytest.raises(BadBudget, match="SafeBudget"):
        prefetch(torch.randn(100), wrong)


@pytest.mark.parametrize("wrong", ["yes", "1", 1, 0.5, [True], "1; int injected"])
def test_keep_is_yes_no_or_chosen(wrong: Any) -> None:
    x, expected = torch.randn(100), "keep: is .*; expected True, False"
    with pytest.raises(ArgumentError, match=expected):
        prefetch(x, 1000, keep=wrong)
    with (
        pytest.raises(ArgumentError, match=expected),
        beside(x, SafeBudget(H200_OVERLAP, 1e-6), keep=wrong),
    ):
        pass
    with pytest.raises(ArgumentError, match=expected):
        inductor_pass(1000, keep=wrong)
    with pytest.raises(ArgumentError, match=expected):
        prefetch_pass(torch.fx.symbolic_trace(torch.nn.Linear(4, 4)), 1000, keep=wrong)


def test_refusals() -> None:
    x = torch.randn(100, 100)
    with pytest.raises(BudgetTooSmall, match="line"):
        prefetch(x, 127)
    with pytest.raises(HasGaps, match=r"tensors\[1\]"):
        prefetch([x, x[:, :50]], 1000)
    with pytest.raises(ArgumentError, match="empty"):
        prefetch([], 1000)
    with pytest.raises(ArgumentError, match="sms"):
        prefetch(x, 1000, sms=0)
    with pytest.raises(WrongDevice):
        prefetch([x, x.to("meta")], 1000)
    with pytest.raises(UnsupportedSpec):
        prefetch(x.to("meta"), 1000)


def test_threads_share_the_kernel() -> None:
    xs = [torch.randn(1000) for _ in range(4)]
    errors = []

    def work(x: torch.Tensor) -> None:
        try:
            assert all(prefetch(x, 4000) == 4000 for _ in range(50))
        except AssertionError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(x,)) for x in xs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_operators_are_what_they_say() -> None:
    x, weight = torch.randn(3), torch.randn(40)
    given: tuple[Any, ...]
    for operator, given in ((prefetch_op, (x, [weight], 1000, 2, True)), (join_prefetch_op, (x,))):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(operator._opoverload, given, test_utils=checks)


def test_compilers_keep_the_operator() -> None:
    weight = torch.randn(40, 40)
    graphs = []

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch.ops.warploom.prefetch(y, [weight], 4000, 2, False)
        return y @ weight

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def compiler(inner: Any, _: Any) -> Any:
            graphs.append(inner)
            return inner

        return aot_autograd(fw_compiler=compiler)(graph, inputs)

    x = torch.randn(3, 40)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))
    assert "warploom" in str(graphs[0].graph)
