"""Fields may range over the rows of a request, as outputs may."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom as wl
from warploom.errors import WrongShape


class ByRow(wl.Variant):
    bias = wl.Tensor("float32", ("batch", "q_idx", "kv_pos"))

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return logits + self.bias[at.batch, at.q_idx, at.kv_pos]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_q_idx_is_a_role_of_tensors(backend: str) -> None:
    torch.manual_seed(5)
    q, (k, v) = torch.randn(2, 2, 5, 16), torch.randn(2, 2, 2, 9, 16)
    bias = torch.randn(2, 5, 9)
    options: Any = {"variant": ByRow(), "layout": "HND", "backend": backend}
    found = wl.attention(q, k, v, bias=bias, **options)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    with pytest.raises(WrongShape, match="q_idx>=5"):
        wl.attention(q, k, v, bias=bias[:, :4], **options)
