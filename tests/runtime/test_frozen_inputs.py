"""Extra inputs of wrappers for CUDA graphs: what stays where it is, and what is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import FrozenByGraph, WrongShape

BOUNDS = wl.Bounds(max_requests=3, max_q_rows=12, max_kv_len=64)
SHAPE: dict[str, Any] = {"num_q_heads": 2, "head_dim": 32, "dtype": "float32", "device": "cpu"}


class Biased(wl.Variant):
    bias = wl.Tensor("float32", ("q_row", "kv_pos"))
    table = wl.Tensor("float32", (None,))

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return logits + self.bias[at.q_row, at.kv_pos] + self.table[at.kv_pos + 1]


class Hidden(wl.Variant):
    """The mask reads its tensors, which are copied wherever they lie on the host."""

    bias = wl.Tensor("float32", ("q_row", "kv_pos"))
    table = wl.Tensor("float32", (None,))

    def logits_mask(self, at: Any) -> Any:
        return self.bias[at.q_row, at.kv_pos] + self.table[at.kv_pos + 1] > -1.0


def graphed(variant: Any) -> wl.AttentionWrapper:
    return wl.AttentionWrapper(variant, bounds=BOUNDS, cuda_graph=True, **SHAPE)


def test_frozen_inputs_keep_their_memory_and_mean_what_they_would() -> None:
    wrapper, plain = graphed(Hidden()), wl.AttentionWrapper(Hidden(), **SHAPE)
    places = []
    for rows, keys, entries in ((4, 20, 9), (12, 64, 9), (2, 5, 3)):
        q, k, v = torch.randn(rows, 2, 32), torch.randn(keys, 2, 32), torch.randn(keys, 2, 32)
        given: dict[str, Any] = {"bias": torch.randn(rows, keys), "table": torch.randn(entries)}
        for each in (wrapper, plain):
            each.plan([0, rows], [0, keys], **given)
        torch.testing.assert_close(wrapper.run(q, (k, v)), plain.run(q, (k, v)))
        tensors = wrapper._inputs.tensors
        places.append([(x.data_ptr(), x.shape, x.stride()) for x in tensors.values()])
    assert places[0] == places[1] == places[2]
    assert wrapper._inputs.tensors["bias"].shape == (12, 64)


def test_a_tensor_padded_to_the_bounds_must_still_serve_the_batch() -> None:
    with pytest.raises(WrongShape, match="batch>=2"):
        graphed(wl.PrefixLM()).plan([0, 1, 2], [0, 9, 18], prefix_len=[3])


def test_frozen_inputs_on_the_device_are_read_in_place() -> None:
    given = {"bias": torch.zeros(4, 20), "table": torch.zeros(21)}
    wrapper, plain = graphed(Biased(**given)), wl.AttentionWrapper(Biased(**given), **SHAPE)
    q, (k, v) = torch.randn(4, 2, 32), torch.randn(2, 20, 2, 32)
    for value in (0.0, 1.0, 2.0):
        given["bias"][:, 3] = value
        for each in (wrapper, plain):
            if value != 2.0:  # runs without a new plan see it, too
                each.plan([0, 4], [0, 20])
        torch.testing.assert_close(wrapper.run(q, (k, v)), plain.run(q, (k, v)))
    with pytest.raises(FrozenByGraph, match="Write new values into the first tensor"):
        wrapper.plan([0, 4], [0, 20], bias=given["bias"].clone())


@pytest.mark.parametrize("given", [np.float64, list, torch.DoubleTensor], ids=str)
def test_what_is_converted_may_be_given_again(given: Any) -> None:
    bias = torch.zeros(4, 20)
    wrapper, plain = graphed(Biased(bias=bias)), wl.AttentionWrapper(Biased(bias=bias), **SHAPE)
    q, (k, v) = torch.randn(4, 2, 32), torch.randn(2, 20, 2, 32)
    for size in (21, 3, 9):
        table = given(torch.randn(size).tolist())
        for each in (wrapper, plain):
            each.plan([0, 4], [0, 20], table=table)
        torch.testing.assert_close(wrapper.run(q, (k, v)), plain.run(q, (k, v)))


def test_frozen_inputs_refuse_to_move() -> None:
    wrapper = graphed(Hidden())
    wrapper.plan([0, 4], [0, 20], bias=torch.zeros(4, 20), table=torch.zeros(9))
    with pytest.raises(FrozenByGraph, match=r"table is .*captured launches keep"):
        wrapper.plan([0, 4], [0, 20], table=torch.zeros(10))
    assert wrapper.planned is None
    wrapper.plan([0, 4], [0, 20], table=torch.zeros(2))


def test_frozen_scalars_of_the_mask_stay() -> None:
    wrapper = graphed(wl.SlidingWindow(4))
    wrapper.plan([0, 4], [0, 20], left=5)
    wrapper.plan([0, 4], [0, 21], left=5)
    with pytest.raises(FrozenByGraph, match="left is 6"):
        wrapper.plan([0, 4], [0, 20], left=6)
