"""Inputs of one run leave nothing behind: each runs as in a new wrapper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import warploom as wl

ROWS, KEYS, HEADS, DIM = 3, 17, 2, 16
SHAPE: dict[str, Any] = {"num_q_heads": HEADS, "head_dim": DIM, "dtype": "float32", "device": "cpu"}


class Everything(wl.Variant):
    factor = wl.Scalar("float32", default=1.0)
    table = wl.Tensor("float32", ("q_head",))
    bias = wl.Tensor("float32", ("kv_pos",))
    left = wl.Scalar("int32", default=100)
    seen = wl.Tensor("bool", ("kv_pos",))

    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return logits * self.factor + self.table[at.q_head] * at.kv_pos + self.bias[at.kv_pos]

    def logits_mask(self, at: wl.Position) -> Any:
        return (at.kv_pos >= at.q_pos - self.left) & self.seen[at.kv_pos]


def tensor(name: str, seed: int) -> torch.Tensor:
    size = HEADS if name == "table" else KEYS
    made = torch.rand(size, generator=torch.Generator().manual_seed(seed))
    return made < 0.7 if name == "seen" else made


tensors_of_run = {name: st.integers(0, 3).map(lambda n, x=name: tensor(x, n)) for name in
                  ("table", "bias")}  # fmt: skip
FACTOR = {"factor": st.sampled_from([0.5, 1.0, 2.0])}
runs = st.fixed_dictionaries({}, optional={**FACTOR, **tensors_of_run})
plans = st.fixed_dictionaries(
    {},
    optional={
        **FACTOR,
        **tensors_of_run,
        "left": st.sampled_from([0, 2, 50]),
        "seen": st.integers(0, 3).map(lambda n: tensor("seen", n)),
    },
)
steps = st.lists(st.tuples(st.sampled_from(["run"] * 4 + ["plan"]), plans), min_size=2, max_size=12)


def attend(wrapper: wl.AttentionWrapper, values: dict[str, Any], step: int) -> torch.Tensor:
    q, k, v = (
        torch.randn(n, HEADS, DIM, generator=torch.Generator().manual_seed(step + i))
        for i, n in enumerate((ROWS, KEYS, KEYS))
    )
    return wrapper.run(q, (k, v), **values)


@settings(max_examples=60, deadline=None)
@given(steps)
@example([("run", {"factor": 2.0}), ("run", {}), ("run", {"table": tensor("table", 9)}),
          ("run", {})])  # fmt: skip
def test_each_run_is_that_of_a_new_wrapper(sequence: list[tuple[str, dict[str, Any]]]) -> None:
    kept: dict[str, Any] = {name: tensor(name, 7) for name in ("table", "bias", "seen")}
    wrapper = wl.AttentionWrapper(Everything(**kept), **SHAPE)
    wrapper.plan([0, ROWS], [0, KEYS])
    for step, (call, values) in enumerate(sequence):
        if call == "plan":
            wrapper.plan([0, ROWS], [0, KEYS], **values)
            kept |= values
            continue
        values = {name: x for name, x in values.items() if name not in ("left", "seen")}
        new = wl.AttentionWrapper(Everything(**{**kept, **values}), **SHAPE)
        new.plan([0, ROWS], [0, KEYS])
        assert torch.equal(attend(wrapper, values, step), attend(new, {}, step)), step


def test_an_appender_uses_no_tensor_of_the_append_before() -> None:
    class Scaled(wl.Variant):
        factor = wl.Scalar("float32", default=1.0)
        table = wl.Tensor("float32", ("kv_head",))

        def key_transform(self, k: Any, at: wl.Position) -> Any:
            return k * self.factor * self.table[at.kv_head]

    shape: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 16, "dtype": "float32", "device": "cpu"}
    append = wl.Appender(Scaled(table=torch.tensor([3.0])), kv_format=wl.Paged(4), **shape)
    found, new = [], torch.ones(1, 1, 16)
    for values in ({}, {"factor": 2.0}, {}, {"table": torch.tensor([5.0])}, {}):
        caches = torch.zeros(1, 4, 1, 16), torch.zeros(1, 4, 1, 16)
        append(new, new, caches, [0, 1], [0, 1], [0], [1], **values)
        found.append(float(caches[0][0, 0, 0, 0]))
    assert found == [3.0, 6.0, 3.0, 5.0, 3.0]


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_numbers_in_tensors_are_read_at_every_call(kind: Any) -> None:
    """Not by which tensor it is: a parameter is written in place."""
    q, k, v = torch.randn(3, 1, 40, 2, 16)
    left, scale = kind(2), kind(0.1)
    wl.attention(q, k, v, variant=wl.SlidingWindow(1, 0), left=left, sm_scale=scale)
    left += 20
    scale += 1.0
    found = wl.attention(q, k, v, variant=wl.SlidingWindow(1, 0), left=left, sm_scale=scale)
    assert torch.equal(
        found, wl.attention(q, k, v, variant=wl.SlidingWindow(22, 0), sm_scale=float(scale))
    )


def test_equal_scales_share_a_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    from warploom.runtime.calls import attention as module

    monkeypatch.setattr(module, "_entries", type(module._entries)())
    q, k, v = torch.randn(3, 1, 4, 2, 16)
    for scale in (0.1, torch.tensor(0.1).double() * 0 + 0.1, torch.tensor(0.1).double() * 0 + 0.1):
        wl.attention(q, k, v, sm_scale=scale)  # pyright: ignore
    assert len(module._entries) == 1
