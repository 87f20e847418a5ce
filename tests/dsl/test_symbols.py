"""Symbols follow NumPy's kinds and values, and refuse by name what needs a value."""

from __future__ import annotations

import operator
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from warploom.dsl.types.ir import Kind, const, node, var
from warploom.dsl.values import functions as wl
from warploom.dsl.values.symbols import Symbol
from warploom.errors import BranchOnSymbol, CannotTrace

KV = Symbol(var("kv_pos"))
Q = Symbol(var("q_pos"))
X = Symbol(node("logits", Kind.FLOAT))
FLAG = Symbol(node("scalar", Kind.BOOL, attr="flag"))

RNG = np.random.default_rng(7)
POSITIONS = {"kv_pos": RNG.integers(-9, 9, 64), "q_pos": RNG.integers(-9, 9, 64)}
LOGITS = RNG.normal(size=64) * 3


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda: KV + Q, Kind.INT),
        (lambda: KV + 1.0, Kind.FLOAT),
        (lambda: 2 * X, Kind.FLOAT),
        (lambda: KV / Q, Kind.FLOAT),
        (lambda: KV // 2, Kind.INT),
        (lambda: X // 2, Kind.FLOAT),
        (lambda: KV % 3, Kind.INT),
        (lambda: KV**2, Kind.INT),
        (lambda: KV**-1, Kind.FLOAT),
        (lambda: 2.0**KV, Kind.FLOAT),
        (lambda: KV <= Q, Kind.BOOL),
        (lambda: (KV < Q) & (Q > 0), Kind.BOOL),
        (lambda: KV & 7, Kind.INT),
        (lambda: ~(KV < Q), Kind.BOOL),
        (lambda: ~KV, Kind.INT),
        (lambda: KV >> 3, Kind.INT),
        (lambda: abs(KV), Kind.INT),
        (lambda: -X, Kind.FLOAT),
        (lambda: FLAG + 1, Kind.INT),
        (lambda: FLAG * X, Kind.FLOAT),
        (lambda: (KV < Q) == FLAG, Kind.BOOL),
        (lambda: wl.where(KV < Q, 1, 2), Kind.INT),
        (lambda: wl.where(KV < Q, 1, 2.0), Kind.FLOAT),
        (lambda: wl.exp(KV), Kind.FLOAT),
        (lambda: wl.floor(X), Kind.FLOAT),
        (lambda: wl.to_int(X), Kind.INT),
        (lambda: wl.minimum(KV, 1.5), Kind.FLOAT),
        (lambda: np.float64(2.0) * KV, Kind.FLOAT),
        (lambda: np.int64(2) * KV, Kind.INT),
    ],
)
def test_kinds(made, kind) -> None:
    assert made().kind is kind


LEAVES = {"kv", "q", "x", 3, -2, 0.75}
OPERATIONS = {
    **{
        name: getattr(operator, name)
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")
    },
    **{name: getattr(wl, name) for name in ("minimum", "maximum", "tanh", "floor")},
    "neg": operator.neg,
    "abs": abs,
    "cube": lambda a: a**3,
    "pick": lambda a, b, c, d: wl.where((a < b) & (c != d) | ~(a >= c), b, d),
    "choose": lambda a, b: wl.where((a == 3) ^ (b <= a), a, b),
}
ARITY = {"neg": 1, "abs": 1, "cube": 1, "tanh": 1, "floor": 1, "pick": 4}


def _trees() -> st.SearchStrategy:
    leaves = st.sampled_from(sorted(LEAVES, key=str))
    return st.recursive(
        leaves,
        lambda inner: st.sampled_from(sorted(OPERATIONS)).flatmap(
            lambda name: st.tuples(st.just(name), *[inner] * ARITY.get(name, 2))
        ),
        max_leaves=12,
    )


def _run(tree, leaves):
    if isinstance(tree, tuple):
        return OPERATIONS[tree[0]](*(_run(inner, leaves) for inner in tree[1:]))
    return leaves[tree] if isinstance(tree, str) else np.asarray(tree)[()]


@settings(max_examples=200, deadline=None)
@given(tree=_trees())
@example(tree=("floordiv", -2, ("floor", "kv")))
def test_any_expression_means_the_same_traced_and_on_numpy(graph, tree) -> None:
    arrays = {"kv": POSITIONS["kv_pos"], "q": POSITIONS["q_pos"], "x": LOGITS}
    with np.errstate(all="ignore"):
        expected = np.broadcast_to(_run(tree, arrays), 64)
        try:
            traced = _run(tree, {"kv": KV, "q": Q, "x": X})
        except CannotTrace as error:  # constants grew beyond 32 bits
            assert "the integer" in str(error) or "as an int" in str(error)
            return
        if not isinstance(traced, Symbol):
            return  # constants only
        found = np.broadcast_to(graph(traced.node, POSITIONS, value=LOGITS), 64)
    small = np.abs(np.nan_to_num(expected, posinf=1e99, neginf=1e99)) < 1e12
    np.testing.assert_allclose(found[small], expected[small], rtol=1e-9, atol=1e-9)


def test_a_branch_is_refused_where_it_is_written(placed) -> None:
    with pytest.raises(BranchOnSymbol) as caught:
        if KV < Q:  # pyright: ignore[reportGeneralTypeIssues]
            pass
    assert placed(caught.value, "KV < Q")


@pytest.mark.parametrize(
    "decide", [lambda: 0 < KV < 5, lambda: (KV < 1) or (Q < 1), lambda: min(KV, Q)]
)
def test_hidden_branches_are_refused(decide) -> None:
    with pytest.raises(BranchOnSymbol) as caught:
        decide()
    assert caught.value.source is not None


@pytest.mark.parametrize(
    ("use", "names"),
    [
        (lambda: float(X), "Python number"),
        (lambda: int(KV), "Python number"),
        (lambda: range(KV), "Python number"),
        (lambda: [1, 2, 3][KV], "Python number"),
        (lambda: np.zeros(4)[KV], "NumPy array"),
        (lambda: X + np.zeros(4), "shape (4,)"),
        (lambda: X[0], "indexing"),
        (lambda: list(X), "indexing"),
        (lambda: {X: 1}, "hashing"),
        (lambda: X + "a", "type str"),
        (lambda: X == None, "NoneType"),  # noqa: E711
        (lambda: np.cumsum(X), "np.cumsum"),
        (lambda: np.add.reduce(X), "np.add.reduce"),
        (lambda: X.cumsum(), ".cumsum"),
        (lambda: (KV < 1) - (Q < 1), "- of bool and bool"),
        (lambda: KV - (Q < 1), "- of int32 and bool"),
        (lambda: (Q < 1) - X, "- of bool and float32"),
        (lambda: X - True, "- of float32 and bool"),
        (lambda: 1 - (Q < 1), "- of int32 and bool"),
        (lambda: np.subtract(KV, Q < 1), "- of int32 and bool"),
        (lambda: torch.sub(*cast(Any, (KV, Q < 1))), "- of int32 and bool"),
        (lambda: (KV < 1) // (Q < 1), "floordiv of bools"),
        (lambda: (KV < 1) << (Q < 1), "a shift of a bool"),
        (lambda: X & (Q < 1), "& of float32 and bool"),
        (lambda: +(KV < 1), "a plus sign of bools"),
        (lambda: -(KV < 1), "negation of bools"),
        (lambda: X & 1, "& of float32 and int32"),
        (lambda: X << 1, "a shift of a float32"),
        (lambda: ~X, "~ of a float32"),
        (lambda: wl.where(KV, 1, 2), "where with a condition of kind int32"),
        (lambda: KV + 2**31, "the integer 2147483648"),
        (lambda: wl.to_int(Symbol(const(float("inf")))), "inf as an int"),
        (lambda: wl.sum(X), "the same in all lanes"),
        (lambda: wl.rotate_half(X), "the same in all lanes"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(use, names, placed, source) -> None:
    with pytest.raises(CannotTrace) as caught:
        use()
    assert names in str(caught.value)
    assert source(caught.value).file == __file__
    assert "lambda" in source(caught.value).text


def test_nodes_carry_the_users_line() -> None:
    made = Symbol(node("scalar", Kind.FLOAT, attr="only_here")) * 17.0
    assert made.node.source is not None
    assert made.node.source.text.strip().startswith("made = Symbol(")
    assert made.source == made.node.source


def test_equal_expressions_are_one_node_and_equal_numbers_are_not() -> None:
    assert (KV + 1).node is (KV + 1).node
    assert (X + 0.0).node is not (X + -0.0).node
    assert (X * 1).node is (X * 1.0).node
    assert (KV + True).node is (KV + 1).node
    assert (X * float("nan")).node is (X * -float("nan")).node


def test_powers_of_whole_numbers_are_products() -> None:
    assert {n.op for n in _nodes((X**5).node)} == {"logits", "mul"}
    assert (X**0.5).node.op == "pow"
    assert (2.0**X).node.op == "exp2"


def test_constant_conditions_disappear() -> None:
    assert wl.where(True, X, KV).node is wl.to_float(X).node
    assert ((KV < Q) & True).node is (KV < Q).node
    assert ((KV < Q) | True).node.attr is True
    assert (~Symbol((FLAG & False).node)).node.attr is True


def _nodes(root):
    from warploom.dsl.types.ir import walk

    return list(walk(root))
