"""The escape hatch: text for kernels, a Python twin for the oracle."""

from __future__ import annotations

import numpy as np
import pytest

import warploom as wl
from warploom.dsl.reference import reference_attention
from warploom.dsl.variants.trace import trace
from warploom.errors import CannotTrace

CUDA = "WL_FN float squash(float x, float y) { return x / (y + fabsf(x)); }"
squash = wl.custom_function("squash", cuda=CUDA, cpp=CUDA, python=lambda x, y: x / (y + np.abs(x)))


class Squashed(wl.Variant):
    def logits_transform(self, logits, at):
        return squash(logits, 1 + at.q_head)


def test_a_call_is_traced_and_its_text_recorded() -> None:
    traced = trace(Squashed())
    root = traced.hooks["logits_transform"]
    assert (root.op, root.attr, len(root.args)) == ("call", "squash", 2)
    assert {arg.kind.value for arg in root.args} == {"float32"}
    (function,) = traced.functions
    assert (function.name, function.cuda, function.cpp, function.arity) == ("squash", CUDA, CUDA, 2)


def test_the_oracle_calls_the_twin() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 1, 8)), rng.normal(size=(3, 1, 8)), rng.normal(size=(3, 1, 8))
    out, _ = reference_attention(Squashed(), q, k, v)
    scores = q[:, 0] @ k[:, 0].T / np.sqrt(8)
    weights = np.exp(scores / (1 + np.abs(scores)))
    np.testing.assert_allclose(out[:, 0], weights @ v[:, 0] / weights.sum(1, keepdims=True))


def test_only_functions_that_are_called_are_recorded() -> None:
    assert trace(wl.Causal()).functions == ()
    assert len(trace(Squashed() & wl.Causal()).functions) == 1


@pytest.mark.parametrize(
    ("declare", "names"),
    [
        (lambda: wl.custom_function("a b", cuda="", python=abs), "'a b'"),
        (lambda: wl.custom_function("f", cuda="g(float)", python=abs), "cuda text defines no f"),
        (
            lambda: wl.custom_function("f", cuda="float f(float)", cpp="g()", python=abs),
            "cpp text defines no f",
        ),
    ],
)
def test_wrong_declarations(declare, names) -> None:
    with pytest.raises(CannotTrace) as caught:
        declare()
    assert names in str(caught.value)


def test_a_wrong_number_of_arguments(placed) -> None:
    class Wrong(wl.Variant):
        def logits_transform(self, logits, at):
            return squash(logits)

    with pytest.raises(CannotTrace, match="squash with 1 arguments") as caught:
        trace(Wrong())
    assert placed(caught.value, "squash(logits)")


def test_two_functions_of_one_name_are_refused() -> None:
    other = wl.custom_function("squash", cuda=CUDA + " ", python=lambda x, y: x)

    class Both(wl.Variant):
        def logits_transform(self, logits, at):
            return squash(logits, 1.0) + other(logits, 1.0)

    with pytest.raises(CannotTrace, match="two different custom functions named 'squash'"):
        trace(Both())
