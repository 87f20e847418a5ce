"""Tensors by key of a batch that has no keys: as long as its caches, they have no element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.dsl.reference import reference_attention
from warploom.errors import WrongShape

HEADS, DIM, ROWS = 2, 32, 4
SHAPE: dict[str, Any] = {
    "num_q_heads": HEADS, "num_kv_heads": HEADS, "head_dim": DIM, "dtype": "float32",
    "device": "cpu",
}  # fmt: skip
BOUNDS = wl.Bounds(max_requests=3, max_q_rows=12, max_kv_len=64)


class ByKey(wl.Variant):
    """Reads tensors by key in all places that see keys, and records logits by key."""

    scale = wl.Tensor("float32", ("batch", "kv_pos", "kv_head"))
    bias = wl.Tensor("float32", ("q_row", "kv_pos"))
    hidden = wl.Tensor("int32", ("batch", "kv_pos"))
    seen = wl.Output("float32", ("q_head", "q_row", "kv_pos"))

    def key_transform(self, k: Any, at: Any) -> Any:
        return k * self.scale[at.batch, at.kv_pos, at.kv_head]

    def value_transform(self, v: Any, at: Any) -> Any:
        return v * self.scale[at.batch, at.kv_pos, at.kv_head]

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return self.seen.record(logits + self.bias[at.q_row, at.kv_pos], at)

    def logits_mask(self, at: Any) -> Any:
        return self.hidden[at.batch, at.kv_pos] == 0


def made(keys: int) -> dict[str, Any]:
    return {
        "scale": torch.rand(1, keys, HEADS) + 0.5,
        "bias": torch.randn(ROWS, keys),
        "hidden": torch.arange(keys, dtype=torch.int32)[None] % 2,
        "seen": torch.zeros(HEADS, ROWS, keys),
    }


@pytest.mark.parametrize("options", [{}, {"bounds": BOUNDS, "cuda_graph": True}], ids=str)
def test_of_a_plan(options: dict[str, Any]) -> None:
    """Zeros without keys; graphs have seen all but the mask's tensor, which is copied."""
    wrapper = wl.AttentionWrapper(ByKey(), **SHAPE, **options)
    kept = made(BOUNDS.max_kv_len) if options else {}
    kept.pop("hidden", None)
    for keys in (0, 5, 0, 3):
        inputs = made(keys) | kept
        wrapper.plan([0, ROWS], [0, keys], **inputs)
        check(wrapper, keys, inputs)


def test_of_a_run() -> None:
    wrapper = wl.AttentionWrapper(ByKey(), **SHAPE)
    for keys in (0, 5, 0):
        inputs = made(keys)
        planned = {"hidden": inputs["hidden"]}
        wrapper.plan([0, ROWS], [0, keys], **planned)
        late = {name: x for name, x in inputs.items() if name not in planned}
        check(wrapper, keys, inputs, late)


def check(
    wrapper: wl.AttentionWrapper,
    keys: int,
    inputs: dict[str, Any],
    late: dict[str, Any] | None = None,
) -> None:
    """A run against the oracle, and zeros where there are no keys."""
    q, k, v = (torch.randn(n, HEADS, DIM) for n in (ROWS, keys, keys))
    out, lse = wrapper.run(q, (k, v), return_lse=True, **(late or {}))
    exact, sums = reference_attention(ByKey(), q, k, v, inputs=inputs)
    np.testing.assert_allclose(out, exact, atol=1e-5)
    np.testing.assert_allclose(lse, sums, atol=1e-5)
    assert keys or (not out.any() and torch.isneginf(lse).all())


def test_dense_and_beside_a_request_with_keys() -> None:
    q, k, v = (torch.randn(1, n, HEADS, DIM) for n in (ROWS, 0, 0))
    assert not wl.attention(q, k, v, variant=ByKey(), **made(0)).any()
    wrapper = wl.AttentionWrapper(ByKey(), **SHAPE)
    longer = {**made(3), "scale": torch.ones(2, 3, HEADS), "hidden": torch.zeros(2, 3).int()}
    longer |= {"bias": torch.zeros(2 * ROWS, 3), "seen": torch.zeros(HEADS, 2 * ROWS, 3)}
    wrapper.plan([0, ROWS, 2 * ROWS], [0, 0, 3], **longer)
    q, k, v = (torch.randn(n, HEADS, DIM) for n in (2 * ROWS, 3, 3))
    out = wrapper.run(q, (k, v))
    assert not out[:ROWS].any() and out[ROWS:].all()


@pytest.mark.parametrize("name", ["scale", "bias", "hidden", "seen"])
def test_keys_without_elements_are_refused(name: str) -> None:
    wrapper = wl.AttentionWrapper(ByKey(), **SHAPE)
    inputs = {**made(2), name: made(0)[name]}
    with pytest.raises(WrongShape, match="kv_pos>=2"):
        wrapper.plan([0, ROWS], [0, 2], **inputs)


def test_tables_need_an_element() -> None:
    """A dimension that no axis bounds is not known to be unread."""

    class Table(wl.Variant):
        table = wl.Tensor("float32", (None,))

        def logits_transform(self, logits: Any, at: Any) -> Any:
            return logits + self.table[at.kv_pos]

    wrapper = wl.AttentionWrapper(Table(), **SHAPE)
    with pytest.raises(WrongShape, match="table"):
        wrapper.plan([0, ROWS], [0, 0], table=torch.zeros(0))
