"""Tensors of the mask that lie on the host are read again by each plan, whatever their type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warploom.dsl.variants.flex import flex
from warploom.errors import PlanMismatch
from warploom.runtime.wrappers.wrapper import AttentionWrapper

SHAPE: dict[str, Any] = {"num_q_heads": 2, "head_dim": 32, "dtype": "float32", "device": "cpu"}


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "int8", "uint8", "bool"])
def test_plan_reads_tensors_of_any_type_again(name: str, backend: Any) -> None:
    dtype = getattr(torch, name)
    weight = torch.ones(20, dtype=dtype)
    wrapper = AttentionWrapper(
        flex(None, lambda b, h, q_idx, kv_idx: weight[kv_idx] > 0), backend=backend, **SHAPE
    )
    weight[9] = 0  # before the first plan
    q, k, v = torch.randn(3, 20, 2, 32)
    for hidden in (3, 17):
        weight[hidden] = 0
        wrapper.plan([0, 20], [0, 20])
        logits = torch.einsum("qhd,khd->hqk", q, k) * 32**-0.5
        logits = logits.masked_fill(weight.float() == 0, -torch.inf)
        exact = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)
        torch.testing.assert_close(wrapper.run(q, (k, v)), exact, atol=1e-5, rtol=1e-4)
        (given,) = wrapper._inputs.tensors
        other: dict[str, Any] = {given: weight.clone()}
        with pytest.raises(PlanMismatch, match="is another tensor"):
            wrapper.run(q, (k, v), **other)
