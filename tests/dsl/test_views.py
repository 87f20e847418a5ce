"""Views of captured tensors are captured tensors, as in FlexAttention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.dsl.reference import reference_attention
from warploom.dsl.variants.trace import trace
from warploom.errors import CannotTrace

HEADS, ROWS, DIM = 2, 10, 16
torch.manual_seed(3)
TABLE = torch.randn(ROWS, HEADS)
CUBE = torch.randn(3, HEADS, ROWS)

VIEWS: dict[str, Any] = {
    "T": lambda h, j: TABLE.T[h, j],
    "a row, then an element": lambda h, j: CUBE[1][h][j],
    "a column": lambda h, j: TABLE[:, 1][j],
    "a slice": lambda h, j: CUBE[1:][0, h, j] + CUBE[0, :, 2:][h][j % 8],
    "a column of the kernel's": lambda h, j: TABLE[:, h][j],
    "both": lambda h, j: CUBE[1:, h][1, j] + CUBE[:, h, j][2],
    "the rest": lambda h, j: CUBE[..., j][0, h] + CUBE[2, ...][h, j] + CUBE[h, ..., j][1],
    "a new axis": lambda h, j: CUBE[0, None][0, h, j] + TABLE[j][None][0, h],
    "part after part": lambda h, j: CUBE[h][:, j][1],
    "view": lambda h, j: TABLE.view(-1)[j * HEADS + h],
    "reshape": lambda h, j: CUBE.reshape(3, -1)[1, h * ROWS + j],
    "transpose": lambda h, j: TABLE.transpose(0, 1)[h, j] + torch.transpose(TABLE, 0, 1)[h][j],
    "permute": lambda h, j: CUBE.permute(2, 0, 1)[j, 0, h],
    "squeeze": lambda h, j: (
        TABLE.unsqueeze(0).squeeze(0)[j, h] + torch.unsqueeze(TABLE, 1)[j, 0, h]
    ),
    "from the end": lambda h, j: TABLE[2:].T[h, -1 - j % 8],
    "a row of a view": lambda h, j: (CUBE[:, h, j] * CUBE[:, h, 0]).sum(-1),
    "the same twice": lambda h, j: TABLE.T[h, j] * TABLE.T[h, 0] + TABLE[j, h],
}


def tensors() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(4)
    return tuple(torch.randn(1, HEADS, ROWS, DIM) for _ in range(3))


@pytest.mark.some(4)
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_what_they_are_in_torch(name: str) -> None:
    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + VIEWS[name](h, j)

    q, k, v = tensors()
    variant = wl.flex(score_mod)
    found = wl.attention(q, k, v, variant=variant, layout="HND")
    rows = [[float(VIEWS[name](h, j)) for j in range(ROWS)] for h in range(HEADS)]
    bias = torch.tensor(rows)[None, :, None].expand(1, HEADS, ROWS, ROWS)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    out, _ = reference_attention(variant, *(x[0].transpose(0, 1) for x in (q, k, v)))
    np.testing.assert_allclose(out, expected[0].transpose(0, 1), atol=2e-5)


def test_numpy_arrays_have_views_too() -> None:
    table, cube = TABLE.numpy(), CUBE.numpy()
    q, k, v = tensors()
    variant = wl.flex(lambda s, b, h, i, j: s + table.T[h, j] + cube[1:, h][0, j])
    expected = wl.flex(lambda s, b, h, i, j: s + TABLE[j, h] + CUBE[1, h, j])
    found, wanted = (wl.attention(q, k, v, variant=x, layout="HND") for x in (variant, expected))
    torch.testing.assert_close(found, wanted)


def test_a_view_is_read_anew_at_each_call() -> None:
    table = TABLE.clone()
    variant = wl.flex(lambda s, b, h, i, j: s + table.T[h, j])
    q, k, v = tensors()
    before = wl.attention(q, k, v, variant=variant, layout="HND")
    table.mul_(3)
    after = wl.attention(q, k, v, variant=variant, layout="HND")
    fresh = wl.attention(q, k, v, variant=wl.flex(lambda s, b, h, i, j: s + 3 * TABLE[j, h]),
                         layout="HND")  # fmt: skip
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, fresh)


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda h, j: TABLE.T.reshape(-1)[j], "copies it"),
        (lambda h, j: TABLE.view(7)[j], "invalid for input"),
        (lambda h, j: TABLE[j:][0, h], "slicing it"),
        (lambda h, j: TABLE.numpy()[::-1][j, h], None),
    ],
)
def test_what_is_no_view_is_refused_by_name(use: Any, named: Any) -> None:
    flipped = TABLE.numpy()
    if named is None:
        use, named = (lambda h, j: flipped[::-1][j, h]), "copies it"
    with pytest.raises(CannotTrace, match=named):
        wl.flex(lambda s, b, h, i, j: s + use(h, j))


def test_declared_tensors_are_indexed_at_once() -> None:
    class Odd(wl.Variant):
        table = wl.Tensor("float32", (None, "q_head"))

        def logits_transform(self, logits: Any, at: Any) -> Any:
            return logits + self.table.T[at.q_head, at.kv_pos]

    with pytest.raises(CannotTrace, match=r"table.*T"):
        trace(Odd())
