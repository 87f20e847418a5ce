"""What users of FlexAttention write: torch's functions that trace, and what is refused instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom import errors
from warploom.dsl.arrays import Array
from warploom.dsl.ir import Kind, node, var
from warploom.dsl.symbols import Symbol

F = torch.nn.functional
X, K = Symbol(node("logits", Kind.FLOAT)), Symbol(var("kv_pos"))
INF, NAN = float("inf"), float("nan")
VALUES = np.array([-INF, -7.5, -2.5, -1.5, -0.5, -0.3, 0.0, 0.49, 0.5, 1.5, 2.5, 6.7, INF, NAN])
INTS = np.arange(-7, 7)
TENSOR = torch.ones(4, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("x", r"is 'x'; expected a function \((score, )?b, h, q_idx, kv_idx\)"),
        (3, r"is 3; expected a function"),
        (TENSOR, r"is a Tensor of shape \(4, 4\), and no function\. .*PackedMask\(\*pack_masks\("),
        (np.ones((2, 4)), r"is a ndarray of shape \(2, 4\).* score \+ bias\[q_idx, kv_idx\]"),
        (wl.Causal(), "is a variant already; .* by &"),
        (wl.Causal, "is a variant already; .* by &"),
    ],
)
@pytest.mark.parametrize("kind", ["score_mod", "mask_mod"])
def test_what_is_no_function(kind: str, given: Any, text: str) -> None:
    with pytest.raises(errors.ArgumentError, match=f"^{kind}: {text}"):
        wl.flex(**{kind: given})


@pytest.mark.parametrize(
    "use",
    [
        lambda x, k: x + k.to(torch.float32) + k.to(torch.float64) + k.to(dtype=torch.float32),
        lambda x, k: k + torch.where(torch.abs(x) < 9, x, 0.0).to(torch.int64),
        lambda x, k: (k.to(torch.bool) | (x > 0).to(torch.bool)).int(),
        lambda x, k: torch.div(x, k - 0.5, rounding_mode=None),
        lambda x, k: torch.div(torch.clamp(x, -9, 9), k - 0.5, rounding_mode="floor"),
        lambda x, k: torch.div(x, k - 0.5, rounding_mode="trunc"),
        lambda x, k: torch.div(k, 3, rounding_mode="floor"),
        lambda x, k: torch.div(k, 3, rounding_mode="trunc"),
        lambda x, k: torch.div(k, -3, rounding_mode="trunc"),
        lambda x, k: x.trunc() + torch.trunc(k),
        lambda x, k: torch.round(x),
        lambda x, k: x.round() + torch.round(k),
        lambda x, k: torch.sign(x) + torch.sign(k),
        lambda x, k: F.relu(x) + torch.relu(x),
        lambda x, k: F.silu(x),
        lambda x, k: torch.add(x, k, alpha=2) + torch.sub(k, x, alpha=0.5) + torch.rsub(k, x),
        lambda x, k: torch.add(k, 1) - torch.rsub(k, 3, alpha=2),
        lambda x, k: F.gelu(x) + F.gelu(x, approximate="tanh"),
    ],
)  # fmt: skip
def test_torch_functions_mean_what_torch_says(use: Any, graph: Any) -> None:
    expected = use(torch.from_numpy(VALUES), torch.from_numpy(INTS)).numpy()
    traced = use(X, K)
    with np.errstate(all="ignore"):
        found = graph(traced.node, {"kv_pos": INTS}, value=VALUES)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(use(VALUES.view(Array), INTS.view(Array)), expected, atol=1e-12)
    is_int = expected.dtype.kind == "i"
    assert traced.kind is (Kind.INT if is_int else Kind.FLOAT)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (
            lambda x: x.to(torch.float16),
            r"\.to\(torch.float16\) .*compute in float32, int32, int16",
        ),
        (lambda x: x.to("cuda"), r"\.to\(cuda\) .*on one device"),
        (lambda x: x.new_full((2,), 1.0), r"a new tensor of shape \(2,\) .*Use numbers"),
        (
            lambda x: torch.zeros_like(x, dtype=torch.float16),
            r"\.to\(float16\) .*compute in float32",
        ),
        (lambda x: x.to(torch.uint8).new_full((), 300), "300 as uint8 .*it holds"),
        (lambda x: x.int().masked_fill(x > 0, 1.5), r"masked_fill of int32 with a float .*where\("),
        (lambda x: x.half(), r"\.half .*float32: leave it out"),
        (lambda x: torch.div(x, 2, rounding_mode="up"), "It is None, 'floor' or 'trunc'"),
        (lambda x: torch.round(x, decimals=2), "2 decimals .*Scale before and after"),
        (lambda x: F.gelu(x, approximate="fast"), "It is 'none' or 'tanh'"),
        (torch.log1p, r"torch.log1p .*Write log\(1 \+ x\)"),
        (torch.expm1, r"torch.expm1 .*Write exp\(x\) - 1"),
        (F.softplus, r"Write maximum\(x, 0\) \+ log\(1 \+ exp\(-abs\(x\)\)\)"),
        (lambda x: torch.fmod(x, 2), r"torch.fmod .*Write x % y, which has the sign of y, or"),
        (lambda x: torch.equal(x, x), r"torch.equal .*Write a == b, .*element by element"),
        (lambda x: x @ torch.ones(3, 3), r"product with a matrix \(@\) .*before the call"),
        (lambda x: torch.ones(3, 3) @ x, "no products of matrices: multiply q, k or v by the"),
        (lambda x: torch.matmul(torch.ones(3, 3), x), "no products of matrices"),
        (lambda x: np.ones((3, 3)) @ x, "no products of matrices"),
    ],
)
def test_what_does_not_trace_is_answered_with_what_to_write(
    use: Any, text: str, source: Any
) -> None:
    with pytest.raises(errors.CannotTrace, match=text) as caught:
        use(X)
    assert source(caught.value).file == __file__


class Projected(wl.Variant):
    matrix = wl.Tensor("float32", (None, "lane"))
    side = "right"

    def query_transform(self, q: Any, at: wl.Position) -> Any:
        return q @ self.matrix if self.side == "right" else self.matrix @ q


@pytest.mark.parametrize("side", ["left", "right"])
def test_products_with_a_field_name_what_to_write(side: str) -> None:
    variant = Projected()
    variant.side = side
    with pytest.raises(errors.CannotTrace, match=r"sum\(x \* self\.matrix\[row, at\.lane\]\)"):
        wl.attention(*torch.zeros(3, 1, 2, 1, 8), variant=variant)
