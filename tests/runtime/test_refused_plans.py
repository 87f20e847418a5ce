"""What a refused plan leaves: no batch to run, and memory and inputs as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.parts import compiled

import warploom as wl
from warploom.errors import ArgumentError, BadIndptr, BoundsExceeded, NotPlanned, WrongShape
from warploom.runtime.devices.params import ParamBlock
from warploom.runtime.devices.workspace import Workspace
from warploom.runtime.inputs.args import Geometry
from warploom.runtime.launching.program import Pass
from warploom.scheduler.plans.capacity import WorkspaceSize


def make(variant: wl.Variant, **options: Any) -> wl.AttentionWrapper:
    return wl.AttentionWrapper(
        variant,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=64,
        dtype="float32",
        device="cpu",
        **options,
    )


def tensors(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, keys, 2, 64)
    return torch.randn(rows, 4, 64), k, v


def test_a_batch_beyond_the_bounds_leaves_memory_and_inputs_as_they_were() -> None:
    bounds = wl.Bounds(max_requests=2, max_q_rows=8, max_kv_len=64)
    attention = make(wl.SlidingWindow(5, 0), bounds=bounds)
    attention.plan([0, 4], [0, 33])
    q, k, v = tensors(4, 33)
    before = attention.run(q, (k, v))
    for qo, kv in (([0, 9], [0, 33]), ([0, 4], [0, 65]), ([0, 1, 2, 3], [0, 1, 2, 3])):
        with pytest.raises(BoundsExceeded, match="above the declared bound"):
            attention.plan(qo, kv, left=3)
        with pytest.raises(NotPlanned, match=r"last plan\(\) was refused"):
            attention.run(q, (k, v), left=5)
    attention.plan([0, 4], [0, 33])
    assert torch.equal(attention.run(q, (k, v), left=5), before)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_refused_plan_leaves_no_batch_to_run(backend: str | None) -> None:
    """Of the batch before, `run` would otherwise give good-looking results for the new one."""
    attention = make(wl.Causal(), kv_format=wl.Paged(16), backend=backend)
    q, cache = tensors(2, 32)[0], torch.randn(4, 2, 16, 2, 64)
    good: Any = {"qo_indptr": [0, 2], "kv_indptr": [0, 2], "kv_indices": [3, 1]}
    attention.plan(**good, last_page_len=[5])
    before = attention.run(q, cache)
    for wrong in (
        {**good, "last_page_len": [17]},
        {**good, "kv_indices": [-1, 0], "last_page_len": [5]},
        {**good, "last_page_len": [5], "colour": 1},
    ):
        with pytest.raises(ArgumentError):
            attention.plan(**wrong)
        for call in (lambda: attention.run(q, cache), attention.check_plan):
            with pytest.raises(NotPlanned, match=r"^the last plan\(\) was refused, .*\. Call plan"):
                call()
        assert attention.planned is None
        attention.plan(**good, last_page_len=[5])
        assert torch.equal(attention.run(q, cache), before)


def test_a_plan_that_fails_over_its_inputs_leaves_none() -> None:
    attention = make(wl.SlidingWindow(4) & wl.Alibi("input"))
    q, k, v = tensors(3, 11)
    slopes = torch.zeros(4)
    attention.plan([0, 3], [0, 11])
    before = attention.run(q, (k, v), slopes=slopes)
    with pytest.raises(BadIndptr):
        attention.plan([0, 3], [0, 11, 5])
    attention.plan([0, 3], [0, 11])
    assert torch.equal(attention.run(q, (k, v), slopes=slopes), before)
    with pytest.raises(WrongShape):
        attention.plan([0, 3], [0, 11], left=1, slopes=torch.zeros(3))
    with pytest.raises(NotPlanned):
        attention.run(q, (k, v), slopes=slopes)


class Kept(wl.Variant):
    seen = wl.Tensor("bool", ("kv_pos",))
    bias = wl.Tensor("float32", ("kv_pos",))

    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return logits + self.bias[at.kv_pos]

    def logits_mask(self, at: wl.Position) -> Any:
        return self.seen[at.kv_pos]


@pytest.mark.parametrize(
    "wrong",
    [
        {"seen": torch.zeros(5, dtype=torch.bool)},
        {"seen": torch.zeros(64, dtype=torch.bool), "bias": torch.zeros(5)},
        {"seen": torch.zeros(64, dtype=torch.bool), "bias": torch.zeros(64, 2)},
        {"seen": torch.zeros(64, dtype=torch.bool), "bias": torch.zeros(64).int()},
    ],
)
@pytest.mark.parametrize("graphed", [False, True])
def test_inputs_of_a_refused_plan_go_nowhere(wrong: dict[str, Any], graphed: bool) -> None:
    """A captured launch would read them."""
    options: dict[str, Any] = {}
    if graphed:
        options = {"bounds": wl.Bounds(2, 4, 64), "cuda_graph": True}
    attention = make(Kept(seen=torch.ones(64, dtype=torch.bool), bias=torch.zeros(64)), **options)
    attention.plan([0, 4], [0, 64])
    q, k, v = tensors(4, 64)
    before = attention.run(q, (k, v))
    memory = attention._inputs.tensors["seen"]
    with pytest.raises(ArgumentError):
        attention.plan([0, 4], [0, 64], **wrong)
    assert memory.all()
    attention.plan([0, 4], [0, 64])
    assert torch.equal(attention.run(q, (k, v)), before)


def once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, when: str = "") -> None:
    """Let the next call of a method, with this as its first argument if one is given, be
    interrupted as by Ctrl-C.
    """
    real = getattr(owner, name)

    def interrupted(self: Any, *args: Any) -> Any:
        if when in ("", *args[:1]):
            monkeypatch.setattr(owner, name, real)
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("step", [(Pass, "bind"), (ParamBlock, "set", "items")])
def test_a_plan_that_was_interrupted_leaves_nothing_half_done(
    monkeypatch: pytest.MonkeyPatch, step: tuple[Any, ...]
) -> None:
    attention, fresh = make(wl.Causal()), make(wl.Causal())
    attention.plan([0, 1], [0, 33])  # another kernel, and less memory
    q, k, v = tensors(900, 900)
    once(monkeypatch, *step)
    with pytest.raises(KeyboardInterrupt):
        attention.plan([0, 900], [0, 900])
    for each in (attention, fresh):
        each.plan([0, 900], [0, 900])
    parts = compiled(attention)
    begin = parts.workspace.address("plan")
    assert parts.params.get("header") == begin
    assert begin < parts.params.get("items") < begin + parts.workspace.bytes
    assert parts.launcher._kernel is attention.planned.kernel  # type: ignore[union-attr]
    launched = parts.launcher.program
    assert launched is not None
    assert launched.attention.kernel is parts.launcher._kernel
    assert torch.equal(attention.run(q, (k, v)), fresh.run(q, (k, v)))


def test_shapes_of_results_are_worked_out_again_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = make(wl.Causal())
    attention.plan([0, 2], [0, 33])
    q, k, v = tensors(3, 33)
    once(monkeypatch, Geometry, "q_shape")
    with pytest.raises(KeyboardInterrupt):
        attention.plan([0, 3], [0, 33])
    attention.plan([0, 3], [0, 33])
    assert attention.run(q, (k, v)).shape == q.shape


def test_values_of_a_run_that_was_interrupted_are_those_of_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = make(wl.SoftCap(5.0))
    attention.plan([0, 2], [0, 33])
    q, k, v = tensors(2, 33)
    before = attention.run(q, (k, v))
    write = ParamBlock.set

    def interrupted(self: ParamBlock, name: str, value: float) -> None:
        write(self, name, value)
        if name == "x_cap":
            monkeypatch.setattr(ParamBlock, "set", write)
            raise KeyboardInterrupt

    monkeypatch.setattr(ParamBlock, "set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attention.run(q, (k, v), cap=0.01)
    assert torch.equal(attention.run(q, (k, v)), before)


def test_counters_are_cleared_by_the_plan_after_one_that_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space, size = Workspace(torch.device("cpu")), WorkspaceSize(512, 0, 0, 256)
    space.fit(WorkspaceSize(4096, 0, 0, 256))
    once(monkeypatch, torch.Tensor, "zero_")
    space.memory.fill_(1)
    with pytest.raises(KeyboardInterrupt):
        space.fit(size)
    space.fit(size)
    assert not space.memory[size.offsets["arrivals"] : size.total].any()
