"""Compilers that turn loops over heads and tiles inside out leave plans and results as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom as wl
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value

pytestmark = pytest.mark.optimised


class ByCounts(wl.Variant):
    """Its condition is the same in all turns of the planner's loops but the head's.

    GCC 13.3 took the decision out of them with a value that only later turns have.
    """

    def logits_mask(self, at: Position) -> Value:
        return abs(at.num_q_heads) == at.kv_head + (at.q_len >= at.kv_pos)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("lengths", [[(1, 1)], [(65, 129), (1, 31), (2, 127)]], ids=["one", "some"])
@pytest.mark.parametrize("kv_format", [wl.Ragged(), wl.Paged(16)], ids=repr)
def test_rows_that_see_keys_get_them(
    heads: int, lengths: list[tuple[int, int]], kv_format: Any
) -> None:
    """Every plan of the tests is verified, by NumPy."""
    sizes: dict[str, Any] = {"num_q_heads": heads, "num_kv_heads": heads, "head_dim": 8}
    wrapper = wl.AttentionWrapper(
        ByCounts(), kv_format=kv_format, dtype="float32", device="cpu", **sizes
    )
    rows = [0, *torch.tensor([q for q, _ in lengths]).cumsum(0).tolist()]
    if isinstance(kv_format, wl.Paged):
        counts = torch.tensor([-(-k // 16) for _, k in lengths]).cumsum(0).tolist()
        last = [(k - 1) % 16 + 1 for _, k in lengths]
        wrapper.plan(rows, [0, *counts], list(range(counts[-1])), last)
        values = torch.randn(counts[-1], 16, heads, 8)
    else:
        wrapper.plan(rows, [0, *torch.tensor([k for _, k in lengths]).cumsum(0).tolist()])
        values = torch.randn(sum(k for _, k in lengths), heads, 8)
    out = wrapper.run(torch.zeros(rows[-1], heads, 8), (torch.zeros_like(values), values))
    assert not out[:, : heads - 1].any(), "no key is seen by heads but the last"
    flat, begin = values.reshape(-1, heads, 8), 0
    for (q, k), row in zip(lengths, rows, strict=False):
        seen = flat[begin : begin + min(q + 1, k), heads - 1]
        expected = seen.mean(0).expand(q, 8)
        torch.testing.assert_close(out[row : row + q, heads - 1], expected)
        begin += -(-k // 16) * 16 if isinstance(kv_format, wl.Paged) else k
