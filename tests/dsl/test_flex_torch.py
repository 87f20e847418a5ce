"""What users of FlexAttention write: torch's functions that trace, and what is refused instead."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

import warploom as wl
from warploom import errors
from warploom.dsl.types.ir import Kind, node, var
from warploom.dsl.values.arrays import Array
from warploom.dsl.values.symbols import Symbol

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
        (wl.Causal(), "is a variant; give it to attention .* by &"),
        (wl.Causal, "is a variant; give it to attention .* by &"),
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
        lambda x, k: torch.log1p(x) + x.abs().log1p() + torch.special.log1p(k * 1.0),
        lambda x, k: torch.expm1(x * 1e-6) + x.expm1(),
        lambda x, k: torch.fmod(x, 2.0) + x.fmod(k * 1.0) + torch.fmod(k, 3) + k.fmod(-2),
        lambda x, k: torch.tan(x) + x.tan() + torch.atan(x) + x.arctan() + k.atan(),
        lambda x, k: torch.sinh(x) + torch.cosh(x) + k.sinh() + x.cosh(),
        lambda x, k: F.softplus(x),
        lambda x, k: F.logsigmoid(x) + F.logsigmoid(k * 1.0),
        lambda x, k: F.softplus(x, beta=3, threshold=2.0) + F.softplus(k * 1.0, 0.5),
        lambda x, k: F.elu(x) + F.elu(x, alpha=0.3, inplace=False),
        lambda x, k: F.leaky_relu(x) + F.leaky_relu(x, 0.2),
        lambda x, k: F.selu(x) + F.celu(x) + F.celu(x, alpha=0.6) + F.mish(x),
        lambda x, k: F.softsign(x) + F.tanhshrink(x) + F.softshrink(x, 0.3) + F.softshrink(x),
        lambda x, k: F.hardshrink(x) + F.hardshrink(x, 0.7) + F.threshold(x, 0.1, -3.0),
        lambda x, k: F.hardtanh(x, -0.4, 0.7) + F.hardtanh(x) + F.relu6(4.0 * x),
        lambda x, k: F.hardsigmoid(x) + F.hardswish(x * 3.0),
        lambda x, k: torch.lerp(x, k.double(), 0.25) + x.lerp(k.double(), 0.75),
        lambda x, k: torch.lerp(k.double(), torch.clamp(x, -2, 2), k.double() * 0.3),
        lambda x, k: torch.where(torch.isinf(x), 1.0, 0.0) + torch.where(x.isnan(), 2.0, 0.0),
        lambda x, k: torch.where(torch.isnan(x) | x.isinf(), 1.0, x),
        lambda x, k: torch.where(torch.isfinite(x), 2.0 * x, k),
        lambda x, k: torch.where(torch.isnan(k) | k.isinf() | ~k.isfinite(), 0, k),
        lambda x, k: torch.max(x, k) + torch.min(x, k * 2) + x.max(k) + k.min(x),
        lambda x, k: torch.max(x, torch.tensor(0.5)) + k.max(torch.tensor(2)),
        lambda x, k: torch.maximum(x, torch.tensor(0.5)) + torch.minimum(k, torch.tensor(2)),
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
    "use",
    [
        lambda x, k: np.log1p(np.abs(x)) + np.expm1(x * 1e-6) + np.tan(x),
        lambda x, k: np.arctan(x) + np.sinh(x) + np.cosh(k),
        lambda x, k: np.fmod(x, 2.5) + np.fmod(k, -3) + np.fmod(k, 0),
        lambda x, k: np.where(np.isnan(x) | np.isinf(x) | ~np.isfinite(x), 1.0, x),
        lambda x, k: np.maximum(x, k) + np.minimum(k, 2),
        lambda x, k: wl.log1p(wl.abs(x)) + wl.expm1(x * 1e-6) + wl.tan(x) + wl.atan(x),
        lambda x, k: wl.where(wl.isnan(x) | wl.isinf(x), wl.sinh(k), wl.cosh(k) + wl.fmod(k, 3)),
    ],
)
def test_numpy_functions_mean_what_numpy_says(use: Any, graph: Any) -> None:
    with np.errstate(all="ignore"):
        expected = np.asarray(use(VALUES, INTS))
        found = graph(use(X, K).node, {"kv_pos": INTS}, value=VALUES)
        np.testing.assert_allclose(found, expected, atol=1e-12)
        kept = use(VALUES.view(Array), INTS.view(Array))
    np.testing.assert_allclose(kept, expected, atol=1e-12)


@pytest.mark.parametrize("op", ["fmod", "trunc"])
def test_whole_divisions_toward_zero_are_exact_at_the_ends(op: str, graph: Any) -> None:
    k: Any = K
    ends = np.array([-(2**31), -(2**31) + 1, -7, -1, 0, 1, 6, 2**31 - 1])
    for divisor in (1, 2, 3, -3, 7, 2**31 - 1, -(2**31)):
        if op == "fmod":
            found = graph(cast("Any", torch.fmod(k, divisor)).node, {"kv_pos": ends})
            expected = [int(np.fmod(int(x), divisor)) for x in ends]
        else:
            traced: Any = torch.div(k, divisor, rounding_mode="trunc")
            found = graph(traced.node, {"kv_pos": ends})
            expected = [int(x) // divisor + (x % divisor != 0 and (x < 0) != (divisor < 0))
                        for x in ends]  # fmt: skip
        assert found.tolist() == expected


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
        (lambda x: torch.max(x, 0), r"max over a dimension .*Write maximum\(a, b\)"),
        (lambda x: x.min(dim=0), r"min over a dimension .*Write maximum\(a, b\)"),
        (lambda x: x.max(), r"max over a dimension .*over lanes, max\(x\)"),
        (lambda x: torch.equal(x, x), r"torch.equal .*Write a == b, .*element by element"),
        (lambda x: x @ torch.ones(3, 3), r"product with a matrix \(@\) .*before the call"),
        (lambda x: torch.ones(3, 3) @ x, "no products of matrices: multiply q, k or v by the"),
        (lambda x: torch.matmul(torch.ones(3, 3), x), "no products of matrices"),
        (lambda x: np.ones((3, 3)) @ x, "no products of matrices"),
        (lambda x: np.linalg.norm(x), r"^np\.linalg\.norm cannot .*Write x \* rsqrt"),
        (lambda x: torch.linalg.norm(x), r"^torch\.linalg\.norm cannot .*Write x \* rsqrt"),
        (lambda x: x[x.int() ^ 1], "^indexing, .* cannot .*use rotate_half"),
    ],
)
def test_what_does_not_trace_is_answered_with_what_to_write(
    use: Any, text: str, source: Any
) -> None:
    with pytest.raises(errors.CannotTrace, match=text) as caught:
        use(X)
    assert source(caught.value).file == __file__


TABLES = {"bias": np.zeros(8, np.float32)}


class Uses(wl.Variant):
    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return logits + TABLES["bias"][at.kv_pos]


def test_an_array_out_of_reach_is_a_tensor_in_flex_and_a_field_in_a_class() -> None:
    with pytest.raises(errors.CannotTrace, match=r"Capture a tensor instead: torch\.from_numpy"):
        wl.flex(lambda score, b, h, i, j: score + TABLES["bias"][j])
    table = torch.from_numpy(TABLES["bias"])
    wl.flex(lambda score, b, h, i, j: score + {"bias": table}["bias"][j])
    with pytest.raises(errors.CannotTrace, match="Declare it as a field"):
        wl.attention(*torch.zeros(3, 1, 2, 1, 8), variant=Uses())


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
