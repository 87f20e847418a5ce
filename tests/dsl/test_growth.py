"""Whether a scale behind a transform of vectors stands for one before it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warploom as wl
from warploom.dsl.graphs.growth import power
from warploom.dsl.variants.trace import trace
from warploom.errors import ScaleBehind, UnscaledTransform


class Given(wl.Variant):
    """Its key transform is the function that it is made with."""

    weight = wl.Tensor("float32", ("lane",))

    def __init__(self, function: Any) -> None:
        self.function = function

    def key_transform(self, k: Any, at: Any) -> Any:
        return self.function(k, self.weight[at.lane])


def power_of(function: Any) -> Any:
    return power(trace(Given(function)).hooks["key_transform"])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda k, w: k * w, 1),
        (lambda k, w: wl.abs(-k) - 3.0 * k, 1),
        (lambda k, w: k * k / w, 2),
        (lambda k, w: k * wl.rsqrt(wl.mean(k * k)), 0),
        (lambda k, w: wl.sqrt(wl.sum(k * k)), 1),
        (lambda k, w: wl.where(k > wl.mean(k), k, w * k), 1),
        (lambda k, w: wl.maximum(k, wl.max(k) * 0.5), 1),
        (lambda k, w: k * wl.rsqrt(wl.mean(k * k) + 1e-6), None),
        (lambda k, w: k + w, None),
        (lambda k, w: wl.maximum(k, 0.0) - wl.where(k < 0.0, k, 0.0), 1),
        (lambda k, w: wl.where(k > 1.0, k, -k), None),
        (lambda k, w: wl.tanh(k), None),
        (lambda k, w: w * 2.0, 0),
        (lambda k, w: wl.where(w > 0.5, k, -math.inf), 1),
    ],
)
def test_powers(function: Any, expected: int | None) -> None:
    assert power_of(function) == expected


LEAVES = st.sampled_from(["k", "w", "2.0"])
TEXTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["({} + {})", "({} - {})", "({} * {})", "wl.minimum({}, {})",
                                   "({} / ({} + 3.0))"]), inner, inner)
        .map(lambda drawn: drawn[0].format(*drawn[1:])),
        st.tuples(st.sampled_from(["wl.abs({})", "-({})", "wl.sqrt(wl.abs({}))", "wl.sum(k * {})",
                                   "wl.where({} > 0.0, k, 2.0 * k)"]), inner)
        .map(lambda drawn: drawn[0].format(drawn[1])),
    ),
    max_leaves=6,
)  # fmt: skip


@given(text=TEXTS, factor=st.sampled_from([0.25, 3.0]))
def test_what_has_a_power_grows_in_it(text: str, factor: float) -> None:
    """By numbers: the transform of a vector, and of a multiple of it."""
    function = eval(f"lambda k, w: {text}", {"wl": wl})
    hooks = trace(Given(function)).hooks
    if "key_transform" not in hooks or (found := power(hooks["key_transform"])) is None:
        return
    keys, weight = np.random.default_rng(0).uniform(-2, 2, (2, 8)).astype(np.float32)
    made = []
    for one in (keys, factor * keys):
        q, k = np.eye(8, dtype=np.float32)[:, None], one[None, None]
        inputs = {"weight": weight}
        _, lse = wl.reference_attention(Given(function), q, k, k, sm_scale=1.0, inputs=inputs)
        made.append(np.ravel(lse))  # of one key it is its logit: a lane of what became of it
    np.testing.assert_allclose(made[1], factor ** float(found) * made[0], rtol=1e-4, atol=1e-5)


NORM = wl.QKNorm(np.ones(64, np.float32), np.ones(64, np.float32))
SCALE = np.ones((1, 40, 2), np.float32)


class Squashed(wl.Variant):
    def value_transform(self, v: Any, at: Any) -> Any:
        return wl.tanh(v)


@pytest.mark.parametrize(
    "variant",
    [
        wl.KVScale(0.03, 0.03) & NORM,
        NORM & wl.Rope() & wl.HeadKVScale(SCALE[0, 0], SCALE[0, 0]),
        wl.TokenKVScale(SCALE, SCALE) & NORM,
        wl.KVScale(0.03, 0.03) & Squashed(),
    ],
)
def test_scales_that_would_be_left_out_are_refused(variant: wl.Variant) -> None:
    with pytest.raises(UnscaledTransform, match=r"KVScale multiplies .* first multiplies its"):
        trace(variant)


def test_scales_go_with_what_grows_as_its_vector() -> None:
    for scale in (wl.KVScale(0.03, 0.03), wl.TokenKVScale(SCALE, SCALE)):
        assert "key_transform" in trace(scale & wl.Rope() & wl.SoftCap(5.0)).hooks
    # one per token is multiplied in before transforms of values that come behind
    trace(wl.TokenKVScale(SCALE, SCALE) & Squashed())


class Gated(wl.Variant):
    def output_transform(self, o: Any, at: Any) -> Any:
        return o * wl.sigmoid(o)


class Nearer(wl.Variant):
    """A product, and no score where it is 0, as a score_mod hides keys."""

    def logits_transform(self, logits: Any, at: Any) -> Any:
        weight = 1.0 / (1 + at.q_pos - at.kv_pos)
        return wl.where(at.kv_pos > at.q_pos, -math.inf, logits * weight)


@pytest.mark.parametrize(
    ("variant", "told"),
    [
        (wl.SoftCap(3.0) & wl.KVScale(0.5, 2.0), r"KVScale\(...\) & SoftCap\(...\)"),
        (wl.Causal() & wl.SoftCap(3.0) & wl.TokenKVScale(), "TokenKVScale before SoftCap"),
        (wl.Alibi() & wl.Rope() & wl.HeadKVScale(), "HeadKVScale before Alibi"),
        (wl.FlashSigmoid(bias=-2.0) & wl.KVScale(), "KVScale before FlashSigmoid"),
        (Squashed() & wl.TokenKVScale(), "Squashed, whose value_transform gets"),
        (Gated() & wl.KVScale(), "Gated, whose output_transform gets"),
    ],
)
def test_scales_behind_what_should_see_them_are_refused(variant: wl.Variant, told: str) -> None:
    with pytest.raises(ScaleBehind, match=told):
        trace(variant)


def test_scales_may_stand_behind_products() -> None:
    for before in (wl.Causal(), wl.Rope(), Nearer(), wl.AttentionSink(), wl.SlidingWindow(4)):
        for scale in (wl.KVScale(0.03, 0.03), wl.HeadKVScale(), wl.TokenKVScale()):
            trace(before & scale & wl.SoftCap(5.0))
            trace(scale & before)
    assert power(trace(wl.Causal() & Nearer()).hooks["logits_transform"]) == 1
