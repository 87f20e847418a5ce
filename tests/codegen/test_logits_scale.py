"""The scale of logits, and what a transform multiplies them with, outside of the inner loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import warploom as wl
from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.lowering.logits_scale import with_scale_outside
from warploom.codegen.lowering.lower import SM_SCALE, reachable
from warploom.dsl.types.ir import Kind, Node, const, node, var
from warploom.dsl.values.evaluate import evaluate
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.trace import trace

LOGITS = node("logits", Kind.FLOAT)
RNG = np.random.default_rng(3)
POSITIONS = {
    "q_pos": np.arange(5)[:, None],
    "kv_pos": np.arange(7)[None, :],
    "q_head": np.full((5, 1), 2),
    "kv_len": np.asarray(9),
}
SCALARS = {"rate": 0.7, "signed": -1.3}
TENSORS = {"bias": RNG.standard_normal(9)}


def f(op: str, *args: Node, attr: Any = None) -> Node:
    return node(op, Kind.FLOAT, args, attr)


def floats_of(position: str) -> Node:
    return f("to_float", var(position))


LEAVES = st.sampled_from(
    [
        LOGITS,
        LOGITS,
        const(0.5),
        const(-2.0),
        node("scalar", Kind.FLOAT, attr="rate"),
        node("scalar", Kind.FLOAT, attr="signed"),
        f("max", node("scalar", Kind.FLOAT, attr="rate"), const(0.01)),
        floats_of("q_head"),
        f("sub", floats_of("kv_pos"), floats_of("q_pos")),
        f("load", var("kv_pos"), attr="bias"),
    ]
)


def grown(parts: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    causal = node("le", Kind.BOOL, (var("kv_pos"), var("q_pos")))
    jumps = parts.map(lambda x: node("lt", Kind.BOOL, (x, const(0.1))))
    return st.one_of(
        st.builds(f, st.sampled_from(["add", "sub", "mul", "mul"]), parts, parts),
        st.builds(f, st.sampled_from(["neg", "tanh"]), parts),
        st.builds(lambda x: f("div", x, const(3.0)), parts),
        st.builds(lambda a, b: f("select", causal, a, b), parts, parts),
        st.builds(lambda c, a, b: f("select", c, a, b), jumps, parts, parts),
    )


def values(root: Node, logits: Any, scale: float) -> Any:
    positions = {**POSITIONS, "sm_scale": np.asarray(scale)}
    return evaluate((root,), positions, SCALARS, TENSORS, logits=logits)[0]


@settings(max_examples=300, deadline=None)
@given(root=st.recursive(LEAVES, grown, max_leaves=8), softmax=st.booleans())
def test_factor_and_rest_are_the_transform(root: Node, softmax: bool) -> None:
    products = RNG.standard_normal((5, 7))
    factor, rest = with_scale_outside(root, softmax)
    assert softmax or factor is const(1.0)
    assert values(factor, 0.0, 0.3) > 0
    assert all(found.op in ("const", "scalar", "max", "mul", "div") or found is SM_SCALE
               for found in reachable([factor]))  # fmt: skip
    made = values(factor, 0.0, 0.3) * values(rest, products, 0.3)
    wanted = values(root, products * 0.3, 0.3)
    np.testing.assert_allclose(made, np.broadcast_to(wanted, made.shape), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-4, 1.0])
@pytest.mark.parametrize("cap", [-2.0, 0.0, 3.0, 1e30])
def test_a_runtime_factor_stays_above_0(cap: float, scale: float) -> None:
    factor, rest = with_scale_outside(trace(wl.SoftCap(3.0)).hooks["logits_transform"], True)
    positions = {"sm_scale": np.asarray(scale)}
    products = RNG.standard_normal(9)
    outside, made = evaluate((factor, rest), positions, {"cap": cap}, {}, logits=products)
    assert outside > 0
    wanted = cap * np.tanh(products * scale / cap) if cap else 0 * products
    np.testing.assert_allclose(outside * made, wanted, rtol=1e-9, atol=1e-29)


@pytest.mark.parametrize("factor", [1e-50, 0.0, -1.0, float("inf"), 1e38])
def test_constants_that_a_float32_may_not_hold_stay_inside(factor: float) -> None:
    root = f("mul", LOGITS, const(factor))
    assert with_scale_outside(root, True)[0] is const(1.0)


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_factors_whose_product_a_float32_may_not_hold_stay_apart(size: float) -> None:
    factor = const(size)
    root = f("add", f("mul", f("mul", LOGITS, factor), factor), const(2.0))
    outside, made = with_scale_outside(root, True)
    found = evaluate((outside, made), {"sm_scale": np.asarray(1.0)}, {}, {}, logits=np.ones(1))
    assert 1e-30 <= found[0] <= 1e30
    np.testing.assert_allclose(found[0] * found[1], size * size + 2.0, rtol=1e-6)


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("fill", [-LARGEST, -1e30, LARGEST])
def test_large_constants_are_not_divided(fill: float) -> None:
    causal = node("le", Kind.BOOL, (var("kv_pos"), var("q_pos")))
    for root in (f("select", causal, LOGITS, const(fill)), f("sub", LOGITS, const(fill))):
        assert with_scale_outside(root, True)[0] is const(1.0)


@pytest.mark.parametrize("weight", [1.0, -1.0, np.inf, -np.inf, np.nan, 0.0, 1e30, -1e308])
def test_what_is_finite_stays_so_when_it_is_divided(weight: float) -> None:
    """Numbers are worked out in float64 here, of which some have no eightfold."""
    field = node("scalar", Kind.FLOAT, attr="weight")
    root = f("add", LOGITS, f("mul", field, floats_of("kv_pos")))
    outside, rest = with_scale_outside(root, True)
    assert outside is SM_SCALE
    positions = {"kv_pos": np.ones(1), "sm_scale": np.asarray(2.0**-3)}
    made = evaluate((rest,), positions, {"weight": weight}, {}, logits=np.zeros(1))
    steepest = 1e20 if np.isfinite(weight) else np.inf
    np.testing.assert_array_equal(made[0], [np.clip(weight * 8, -steepest, steepest)])


def test_slopes_whose_product_overflows_leave_a_distance_of_0_at_0() -> None:
    field = node("scalar", Kind.FLOAT, attr="weight")
    root = f("add", LOGITS, f("mul", field, f("mul", field, floats_of("kv_pos"))))
    outside, rest = with_scale_outside(root, True)
    assert outside is SM_SCALE
    positions = {"kv_pos": np.zeros(1), "sm_scale": np.asarray(2.0**-3)}
    with np.errstate(over="ignore"):
        made = evaluate((rest,), positions, {"weight": 1e200}, {}, logits=np.ones(1))
    assert made[0] == 1.0


@pytest.mark.parametrize("bias", ["kv_pos", "q_pos"])
def test_terms_without_logits_are_looked_at_once(bias: str) -> None:
    doubled = summed = floats_of(bias)
    squared = f("exp", summed)
    for n in range(40):  # 2 ** 40 paths, and a number of 25 bits more
        doubled = f("add", doubled, doubled if n < 25 else const(0.0))
        squared = f("mul", squared, squared)
    for _ in range(3000):
        summed = f("add", summed, floats_of(bias))
    for root, outside in ((doubled, SM_SCALE), (summed, SM_SCALE), (squared, const(1.0))):
        assert with_scale_outside(f("add", LOGITS, root), True)[0] is outside


def test_what_a_small_factor_makes_too_large_is_not_divided() -> None:
    causal = node("le", Kind.BOOL, (var("kv_pos"), var("q_pos")))
    small = f("mul", LOGITS, const(1e-25))
    outside, _ = with_scale_outside(f("select", causal, small, const(-1e18)), True)
    assert outside is const(1.0)


def test_weights_of_what_is_no_distance_are_not_divided() -> None:
    """Two such terms of a row could be clamped to one value, which no row of the user's is."""
    field = node("scalar", Kind.FLOAT, attr="weight")
    causal = node("le", Kind.BOOL, (var("kv_pos"), var("q_pos")))
    for other in (
        f("select", causal, const(2.0), const(0.0)),
        f("load", var("kv_pos"), attr="bias"),
    ):
        root = f("add", LOGITS, f("mul", field, other))
        assert with_scale_outside(root, True)[0] is const(1.0)


def test_shared_parts_and_long_sums_are_rewritten_once() -> None:
    doubled, summed = LOGITS, LOGITS
    for _ in range(40):  # 2 ** 40 paths
        doubled = f("add", doubled, f("tanh", doubled))
    for i in range(3000):
        summed = f("add", summed, f("mul", floats_of("kv_pos"), const(float(i))))
    assert with_scale_outside(doubled, True)[0] is const(1.0)
    assert with_scale_outside(summed, True)[0] is SM_SCALE


def text_of(transform: Callable[[Any, Value, Position], Value], softmax: bool = True) -> str:
    """What an element computes, and the factor."""
    fields = {
        "cap": wl.Scalar("float32", default=2.0),
        "size": wl.Scalar("int32", default=65536),
        "slope": wl.Tensor("float32", ("q_head",)),
        "softmax": softmax,
    }
    made: Any = type("Made", (wl.Variant,), {**fields, "logits_transform": transform})
    text = variant_struct(trace(made(slope=np.ones(4, np.float32))), "cuda")
    lines = [line.split("//")[0].strip() for line in text.splitlines() if "return" in line]
    return " ".join(line for line in lines if "{" not in line and "precise" not in line)


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (lambda self, x, at: x * 3.0, "return logits; return positive_scale(p) * 3.0f;"),
        (lambda self, x, at: x * self.cap, "return logits * ts.t0; return 1.0f;"),
        (  # ints above 0 whose product wraps to 0
            lambda self, x, at: x * (wl.maximum(self.size, 1) * wl.maximum(self.size, 65536)),
            "return logits * ts.t0; return 1.0f;",
        ),
        (lambda self, x, at: 4.0 * wl.tanh(x / 4.0), "return tanh(logits * ts.t0); return 4.0f;"),
        (
            lambda self, x, at: x + self.slope[at.q_head] * (at.kv_pos - at.q_pos),
            "return logits + rs.r0 * (cs.c0 - rs.r1); return positive_scale(p);",
        ),
        (
            lambda self, x, at: wl.where(at.kv_pos <= at.q_pos, x, -5.0),
            "return kv_pos <= row.q_pos ? logits : ts.t0; return positive_scale(p);",
        ),
        (
            lambda self, x, at: wl.where(at.kv_pos <= at.q_pos, x, -float("inf")),
            "return kv_pos <= row.q_pos ? logits : -kInfinity; return positive_scale(p);",
        ),
    ],
)
def test_elements_are_left_with_few_products(
    transform: Callable[[Any, Value, Position], Value], text: str
) -> None:
    assert text_of(transform) == text


def test_steps_are_taken_where_the_users_are() -> None:
    text = text_of(lambda self, x, at: wl.floor(x / 2.0) + 1.0)
    assert text == "return floor(logits * positive_scale(p) / 2.0f) + 1.0f; return 1.0f;"


def test_without_a_softmax_nothing_is_left_to_it() -> None:
    text = text_of(lambda self, x, at: wl.sigmoid(x + 1.0) * 2.0, softmax=False)
    assert text == "return sigmoid(logits * positive_scale(p) + 1.0f) * 2.0f;"


def test_the_cpu_has_logits_that_are_scaled() -> None:
    text = variant_struct(trace(wl.SoftCap(4.0)), "cpp")
    assert "logits_factor" not in text
    assert "positive_scale" not in text
