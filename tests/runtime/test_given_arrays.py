"""NumPy arrays and lists for tensor fields, also where torch records what wants a gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import ArgumentError, FieldMisuse


class Scaled(wl.Variant):
    temperature = wl.Tensor("float32", ("q_head",))
    weight = wl.Tensor("float32", ("q_head",))
    rate = wl.Scalar("float32", default=1.0)

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return logits * self.rate * self.temperature[at.q_head] * self.weight[at.q_head]


GENERATOR = torch.Generator().manual_seed(0)
Q = torch.randn(1, 9, 4, 64, generator=GENERATOR)
K, V = torch.randn(2, 1, 9, 2, 64, generator=GENERATOR)
ARRAY = np.array([0.5, 1.0, 2.0, 3.0], np.float32)
GIVEN: dict[str, Any] = {"temperature": ARRAY, "rate": np.float32(0.5)}


def variant(learnt: bool) -> Scaled:
    ones = torch.ones(4)
    return Scaled(weight=torch.nn.Parameter(ones) if learnt else ones)


def wrapper(learnt: bool) -> wl.AttentionWrapper:
    made = wl.AttentionWrapper(
        variant(learnt), kv_format=wl.Ragged(), num_q_heads=4, num_kv_heads=2, head_dim=64,
        dtype="float32", device="cpu",
    )  # fmt: skip
    made.plan([0, 9], [0, 9])
    return made


@pytest.mark.parametrize("learnt", [False, True])
def test_arrays_where_a_gradient_may_be_asked_for(learnt: bool) -> None:
    """Of q, or of a parameter that is bound to another field."""
    q = Q.clone().requires_grad_(not learnt)
    with torch.no_grad():
        expected = wl.attention(Q, K, V, variant=variant(False), **GIVEN)
    out = wl.attention(q, K, V, variant=variant(learnt), **GIVEN)
    torch.testing.assert_close(out.detach(), expected)
    out = wrapper(learnt).run(q[0], (K[0], V[0]), **GIVEN)
    torch.testing.assert_close(out.detach(), expected[0])


@pytest.mark.parametrize("wants", [False, True])
def test_lists_are_planned_and_elsewhere_refused_with_what_to_write(wants: bool) -> None:
    q, numbers = Q.clone().requires_grad_(wants), ARRAY.tolist()
    cure = r"a list is .*; give a tensor, such as torch.tensor\(\[...\]\)"
    with pytest.raises(ArgumentError, match=cure):
        wl.attention(q, K, V, variant=variant(False), temperature=numbers)
    made = wrapper(False)
    with pytest.raises(ArgumentError, match=cure):
        made.run(q[0], (K[0], V[0]), temperature=numbers)
    with pytest.raises(FieldMisuse, match=r"torch\.tensor"):
        Scaled(temperature=numbers)
    made.plan([0, 9], [0, 9], temperature=numbers)
    expected = wl.attention(Q, K, V, variant=variant(False), temperature=ARRAY)
    torch.testing.assert_close(made.run(q[0], (K[0], V[0])).detach(), expected[0])
