"""Functions build IR on symbols and are NumPy's on arrays; torch's and NumPy's names work."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest
import torch

from warploom.dsl.types.ir import Kind, node, var
from warploom.dsl.values import functions as wl
from warploom.dsl.values.arrays import Array, Array32
from warploom.dsl.values.symbols import Symbol
from warploom.errors import CannotTrace

X = Symbol(node("logits", Kind.FLOAT))
KV = Symbol(var("kv_pos"))
LANE = Symbol(var("lane"))
VECTOR = Symbol(node("element", Kind.FLOAT, (var("lane"),)))
HEAD_DIM = Symbol(var("head_dim"))

UNARY = [
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "rsqrt",
    "tanh",
    "sigmoid",
    "sin",
    "cos",
    "erf",
    *("log1p", "expm1", "tan", "atan", "sinh", "cosh"),
    "floor",
    "ceil",
    "abs",
]


@pytest.mark.parametrize("name", UNARY)
def test_unary_functions(name, graph) -> None:
    x = np.linspace(0.1, 3, 20)
    function = getattr(wl, name)
    assert function(X).node.op == name
    np.testing.assert_allclose(graph(function(X).node, {}, value=x), function(x))


@pytest.mark.parametrize("name", [name for name in UNARY if name not in ("floor", "ceil", "abs")])
def test_precise_is_kept_in_the_graph(name) -> None:
    function = getattr(wl, name)
    assert function(X, precise=True).node.attr == ("precise",)
    assert function(X).node.attr is None
    assert np.isfinite(function(np.float64(0.5), precise=True))


def test_sigmoid_is_exact_at_its_ends() -> None:
    assert wl.sigmoid(np.array([-np.inf, np.inf, 0.0])).tolist() == [0.0, 1.0, 0.5]
    assert wl.sigmoid(-700.0) == pytest.approx(math.exp(-700.0), rel=1e-12)


TORCH_AND_NUMPY = [
    (lambda m, x, k: m.where(k > 2, x, -1.0), lambda x, k: np.where(k > 2, x, -1.0)),
    (lambda m, x, k: m.tanh(x) * m.exp(-x), lambda x, k: np.tanh(x) * np.exp(-x)),
    (lambda m, x, k: m.abs(x) + m.minimum(x, k), lambda x, k: np.abs(x) + np.minimum(x, k)),
    (lambda m, x, k: m.clip(x, 0.2, 1.0), lambda x, k: np.clip(x, 0.2, 1.0)),
    (
        lambda m, x, k: m.where(m.logical_and(k > 1, m.logical_not(x > 1)), x, 0.0),
        lambda x, k: np.where((k > 1) & ~(x > 1), x, 0.0),
    ),
    (lambda m, x, k: m.subtract(m.square(x), m.remainder(k, 3)), lambda x, k: x**2 - k % 3),
]


@pytest.mark.parametrize("library", [np, torch])
@pytest.mark.parametrize(("functor", "expected"), TORCH_AND_NUMPY)
def test_numpy_and_torch_names_in_both_readings(library, functor, expected, graph) -> None:
    x, k = np.linspace(-2, 2, 9), np.arange(9)
    traced = functor(library, X, KV)
    np.testing.assert_allclose(graph(traced.node, {"kv_pos": k}, value=x), expected(x, k))
    np.testing.assert_allclose(functor(library, x.view(Array), k.view(Array)), expected(x, k))


def test_methods_of_torch_tensors_in_both_readings(graph) -> None:
    def functor(x, k):
        return x.tanh().clamp(min=-0.5) + k.float().sqrt() * (k > 3).float()

    x, k = np.linspace(-2, 2, 9), np.arange(9)
    expected = np.maximum(np.tanh(x), -0.5) + np.sqrt(k) * (k > 3)
    np.testing.assert_allclose(graph(functor(X, KV).node, {"kv_pos": k}, value=x), expected)
    np.testing.assert_allclose(functor(x.view(Array), k.view(Array)), expected)


@pytest.mark.parametrize(
    ("use", "names"),
    [
        (lambda x: torch.cumsum(x, 0), "torch.cumsum"),
        (lambda x: torch.special.bessel_j0(x), "torch.special.bessel_j0"),
        (lambda x: torch.abs(x, out=torch.zeros(3)), "torch.abs with these arguments"),
        (lambda x: torch.zeros(3)[x], "indexing a plain torch tensor"),
        (lambda x: torch.zeros(3) + x, "torch.Tensor of shape (3,)"),
        (lambda x: x.new_ones((3,)), "shape (3,)"),
    ],
)
def test_torch_functions_that_cannot_be_traced(use, names, source) -> None:
    with pytest.raises(CannotTrace) as caught:
        use(KV)
    assert names in str(caught.value)
    assert source(caught.value).file == __file__


def test_torch_numbers_are_constants() -> None:
    assert (torch.tensor(2.0) * X).node is (2.0 * X).node
    assert (X + torch.tensor(1)).node is (X + 1).node
    assert (torch.tensor(7) & KV).node is (7 & KV).node
    assert (torch.tensor(2) - KV).node is (2 - KV).node


@pytest.mark.parametrize("number", [3, -2, 2.5])
@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "xor"]
)
def test_torch_numbers_compute_as_python_numbers_do(name: str, number: float) -> None:
    """On either side, while traced and on arrays."""
    if isinstance(number, float) and name in ("lshift", "rshift", "xor"):
        return
    operation, k = getattr(operator, name), np.arange(1, 6).view(Array)
    for use in (operation, lambda a, b: operation(b, a)):
        assert use(KV, torch.tensor(number)).node is use(KV, number).node
        found, expected = use(k, torch.tensor(number)), use(k, number)
        assert type(found) is Array
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_torch_numbers_compare_as_python_numbers_do(name: str) -> None:
    compare, k = getattr(operator, name), np.arange(1, 6).view(Array)
    assert compare(KV, torch.tensor(3)).node is compare(KV, 3).node
    found = compare(k, torch.tensor(3))
    assert type(found) is Array
    np.testing.assert_array_equal(found * (2**31 - 1) * 2, compare(k, 3) * (2**31 - 1) * 2)


# --- vectors

ROWS = np.random.default_rng(0).normal(size=(3, 8))
WHERE = {"lane": np.arange(8)[None], "head_dim": np.array([[8]])}


def _half(x, dim):
    out = x.copy()
    out[:, : dim // 2], out[:, dim // 2 : dim] = -x[:, dim // 2 : dim], x[:, : dim // 2]
    return out


def _pairs(x, dim):
    out = x.copy()
    out[:, 0:dim:2], out[:, 1:dim:2] = -x[:, 1:dim:2], x[:, 0:dim:2]
    return out


@pytest.mark.parametrize("dim", [None, 4, 6])
@pytest.mark.parametrize(
    ("rotate", "by_hand"), [(wl.rotate_half, _half), (wl.rotate_pairs, _pairs)]
)
def test_rotations_of_the_input_and_of_expressions(rotate, by_hand, dim, graph) -> None:
    width = dim or 8
    for functor in (
        lambda x, lane: x,
        lambda x, lane: x * x + lane,
        lambda x, lane: x * wl.rsqrt(wl.mean(x * x) + 1e-3),
        lambda x, lane: rotate(x, dim) * lane,
        lambda x, lane: lane * 2,
    ):
        inner = np.broadcast_to(functor(ROWS, WHERE["lane"]), ROWS.shape)
        expected = by_hand(inner, width)
        np.testing.assert_allclose(rotate(inner, dim), expected)
        traced = rotate(functor(VECTOR, LANE), dim).node
        found = np.broadcast_to(graph(traced, WHERE, value=ROWS), ROWS.shape)
        np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("reduce", "by_hand"), [(wl.sum, np.sum), (wl.mean, np.mean), (wl.max, np.max)]
)
def test_reductions_over_lanes(reduce, by_hand, graph) -> None:
    expected = by_hand(ROWS * np.arange(8), axis=-1, keepdims=True)
    np.testing.assert_allclose(reduce(ROWS * WHERE["lane"]), expected)
    np.testing.assert_allclose(graph(reduce(VECTOR * LANE).node, WHERE, value=ROWS), expected)


def test_reductions_nest(graph) -> None:
    def functor(x):
        centred = x - wl.mean(x)
        return wl.rotate_half(centred / wl.max(wl.abs(centred))) + wl.sum(wl.rotate_pairs(x) * x)

    found = np.broadcast_to(graph(functor(VECTOR).node, WHERE, value=ROWS), ROWS.shape)
    np.testing.assert_allclose(found, functor(ROWS), atol=1e-12)


def test_lane_arithmetic_of_rotations_is_in_ints() -> None:
    from warploom.dsl.types.ir import walk

    for rotate in (wl.rotate_half, wl.rotate_pairs):
        for found in walk(rotate(VECTOR).node):
            if found.op == "element":
                assert {n.kind for n in walk(found.args[0])} <= {Kind.INT, Kind.BOOL}


def test_a_sum_is_no_vector() -> None:
    with pytest.raises(CannotTrace, match="the same in all lanes"):
        wl.rotate_half(wl.sum(VECTOR))


# --- arrays of the NumPy reading


def test_arrays_are_not_changed_in_place() -> None:
    x = np.arange(3.0).view(Array)
    y = x
    y += 1
    assert x.tolist() == [0, 1, 2] and y.tolist() == [1, 2, 3]
    with pytest.raises(CannotTrace, match="assigning"):
        x[0] = 5


def test_single_precision_arrays_round_every_result() -> None:
    k = np.array([16777217]).view(Array32)
    assert (k * 1.0).dtype == np.float32 and (k / 1).dtype == np.float32
    assert (k + 1).dtype.kind == "i"
    assert np.where(k > 0, k * 0.1, 0.5).dtype == np.float32
    assert type(wl.where(k > 0, k * 1.0, 0.5)) is Array32
