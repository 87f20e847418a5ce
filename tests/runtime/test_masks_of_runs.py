"""Masks that only a run is given: on the CPU they must fit the batch, as those of a plan must."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import ArgumentError

SHAPE: dict[str, Any] = {
    "num_q_heads": 2, "head_dim": 32, "dtype": "float32", "device": "cpu",
}  # fmt: skip
Q = torch.randn(9, 2, 32)
KV = torch.randn(60, 2, 32), torch.randn(60, 2, 32)
SIZES = {wl.PackedMask: [(1, 40), (8, 20)], wl.TreeMask: [(1, 1), (8, 8)]}
KINDS = pytest.mark.parametrize("kind", list(SIZES))


def packed(*shapes: tuple[int, int]) -> dict[str, Any]:
    bits, offsets = wl.pack_masks([np.tri(*shape, dtype=bool) for shape in shapes])
    return {"packed_mask": torch.from_numpy(bits), "mask_indptr": torch.from_numpy(offsets)}


def planned(variant: Any, **options: Any) -> wl.AttentionWrapper:
    made = wl.AttentionWrapper(variant, **SHAPE, **options)
    made.plan([0, 1, 9], [0, 40, 60])
    return made


@KINDS
@pytest.mark.parametrize("backend", [None, "reference"])
def test_they_must_have_the_bits_of_the_batch(kind: Any, backend: str | None) -> None:
    sizes, attention = SIZES[kind], planned(kind() & wl.SoftCap(9.0), backend=backend)
    as_planned = planned(kind(**packed(*sizes)) & wl.SoftCap(9.0)).run(Q, KV)
    torch.testing.assert_close(attention.run(Q, KV, **packed(*sizes)), as_planned)
    with pytest.raises(ArgumentError, match=r"packed_mask: request 0 has .* bits; the batch needs"):
        attention.run(Q, KV, **packed(*reversed(sizes)))
    with pytest.raises(ArgumentError, match=r"mask_indptr: has 2 entries; expected .* = 3"):
        attention.run(Q, KV, **packed(sizes[0]))
    torch.testing.assert_close(attention.run(Q, KV, **packed(*sizes)), as_planned)


@KINDS
def test_offsets_of_the_run_must_fit_the_bits_of_the_plan(kind: Any) -> None:
    sizes = SIZES[kind]
    attention = planned(kind(packed_mask=packed(*sizes)["packed_mask"]))
    attention.run(Q, KV, mask_indptr=packed(*sizes)["mask_indptr"])
    with pytest.raises(ArgumentError, match="packed_mask: request 0 has"):
        attention.run(Q, KV, mask_indptr=packed(*reversed(sizes))["mask_indptr"])


class Counted(wl.Variant):
    """Keys up to a limit of each request; counts how often that is looked at."""

    limit = wl.Tensor("int32", ("batch",))
    looks = 0

    def logits_mask(self, at: wl.Position) -> Any:
        return at.kv_pos < self.limit[at.batch]

    def check_lengths(self, known: Any, q_lens: Any, kv_lens: Any) -> None:
        type(self).looks += "limit" in known
        if (known.get("limit", kv_lens) > kv_lens).any():
            raise ArgumentError(name="limit", reason="is beyond the keys")


def test_a_tensor_is_looked_at_again_once_it_was_written_to(monkeypatch: Any) -> None:
    monkeypatch.setattr(Counted, "looks", 0)
    attention = planned(Counted())
    limit, other = (torch.tensor([30, 10], dtype=torch.int32) for _ in range(2))
    for _ in range(3):
        attention.run(Q, KV, limit=limit)
    assert Counted.looks == 1
    attention.run(Q, KV, limit=other)
    assert Counted.looks == 2
    other[1] = 21
    with pytest.raises(ArgumentError, match="limit: is beyond the keys"):
        attention.run(Q, KV, limit=other)
    attention.run(Q, KV, limit=limit)
    attention.plan([0, 1, 9], [0, 20, 60])  # the batch is another
    with pytest.raises(ArgumentError, match="limit: is beyond the keys"):
        attention.run(Q, KV, limit=limit)


def test_an_array_of_numpy_is_always_looked_at(monkeypatch: Any) -> None:
    """It does not count writes."""
    monkeypatch.setattr(Counted, "looks", 0)
    attention, limit = planned(Counted()), np.array([30, 10], np.int32)
    attention.run(Q, KV, limit=limit)
    limit[1] = 21
    with pytest.raises(ArgumentError, match="limit: is beyond the keys"):
        attention.run(Q, KV, limit=limit)
    assert Counted.looks == 2
