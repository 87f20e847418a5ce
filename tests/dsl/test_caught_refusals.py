"""Functors that catch a refusal: it is raised all the same, or the kernel would be another."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.dsl.types.spec import HOOKS
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.errors import BranchOnSymbol, CannotTrace, NoNumber, UndeclaredField

TABLE = torch.ones(4)


def catching(compute: Callable[[Any, Any], Any], caught: type[BaseException] = Exception) -> Any:
    """A functor that goes on with its value where `compute(value, at)` raises."""

    def functor(self: Variant, value: Any, at: Any) -> Any:
        try:
            return compute(value, at)
        except caught:
            return value

    return functor


def variant_of(hook: str, functor: Any) -> Variant:
    if hook == "logits_mask":
        return type(
            "Caught", (Variant,), {hook: lambda self, at: functor(self, at.q_pos >= 0, at)}
        )()
    return type("Caught", (Variant,), {hook: functor})()


def branching(x: Any, at: Any) -> Any:
    return x if x > 0 else -x


@pytest.mark.parametrize("hook", HOOKS)
def test_a_branch_that_is_caught(hook: str) -> None:
    decide = (lambda x, at: x if x else ~x) if hook == "logits_mask" else branching
    with pytest.raises(BranchOnSymbol) as caught:
        trace(variant_of(hook, catching(decide)))
    assert caught.value.source is not None
    assert "if" in caught.value.source.text


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, at: float(x) * x,
        lambda x, at: x * math.tanh(x),
        lambda x, at: x * len(range(at.kv_len)),
        lambda x, at: [x, -x][at.kv_pos],
        lambda x, at: x * float(f"{x:.3f}"),
        lambda x, at: x.item() * 2,
        lambda x, at: np.cumsum(x),
        lambda x, at: torch.cumsum(x, 0),
        lambda x, at: torch.tensor([x]),
        lambda x, at: np.array([x, 1.0])[0],
        lambda x, at: {x: 1}[x],
        lambda x, at: x[0],
        lambda x, at: x.foo,
        lambda x, at: x * at.lane,
        lambda x, at: x + "1",
    ],
)
def test_other_refusals_that_are_caught(compute: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(CannotTrace):
        trace(variant_of("logits_transform", catching(compute)))


def test_a_refusal_in_a_helper_that_catches_all() -> None:
    def helper(x: Any) -> Any:
        try:
            return max(x, 0.0)
        except BaseException:
            return x

    with pytest.raises(BranchOnSymbol):
        trace(variant_of("logits_transform", lambda self, x, at: helper(x)))


def test_in_a_chain_and_in_flex() -> None:
    part = variant_of("logits_transform", catching(branching))
    with pytest.raises(BranchOnSymbol):
        trace(wl.Causal() & part)
    with pytest.raises(BranchOnSymbol):
        wl.flex(lambda s, b, h, i, j: catching(branching)(None, s, None))


def test_the_first_of_several_is_raised() -> None:
    def functor(self: Variant, logits: Any, at: Any) -> Any:
        for compute in (branching, lambda x, at: math.exp(x)):
            logits = catching(compute)(self, logits, at)
        return logits

    with pytest.raises(BranchOnSymbol):
        trace(variant_of("logits_transform", functor))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, at: x * int("no number"),
        lambda x, at: x * {"a": 1}["b"],
        lambda x, at: x * json.loads("{"),
        lambda x, at: x * (1 / 0),
    ],
)
def test_errors_of_python_are_the_functors_own(compute: Callable[[Any, Any], Any]) -> None:
    traced = trace(variant_of("logits_transform", catching(compute)))
    assert not traced.hooks  # the identity


def test_a_field_that_is_looked_for() -> None:
    def functor(self: Variant, logits: Any, at: Any) -> Any:
        return logits * getattr(self, "rate", 2.0) if not hasattr(logits, "item") else logits

    assert trace(variant_of("logits_transform", functor)).hooks


def test_a_field_that_is_misspelt() -> None:
    def functor(self: Any, logits: Any, at: Any) -> Any:
        return catching(lambda x, _: x * self.raet)(self, logits, at)

    with pytest.raises(UndeclaredField, match="raet"):
        trace(variant_of("logits_transform", functor))


@pytest.mark.parametrize("catches", [True, False])
def test_a_refusal_holds_nothing_once_it_was_handled(catches: bool) -> None:
    class Held:
        pass

    def attempt() -> weakref.ref[Held]:
        held = Held()
        functor = catching(branching) if catches else lambda self, x, at: branching(x, at)
        with contextlib.suppress(BranchOnSymbol):
            trace(variant_of("logits_transform", functor))
        return weakref.ref(held)

    gc.disable()
    try:
        assert attempt()() is None
    finally:
        gc.enable()


def test_torch_asks_an_index_for_its_length() -> None:
    """It catches the refusal itself, and then lets the index decide."""
    holder = SimpleNamespace(table=TABLE)
    made = wl.flex(lambda s, b, h, i, j: s + holder.table[h])
    assert trace(made).tensors


def test_no_number_says_what_it_means() -> None:
    with pytest.raises(NoNumber, match="Leave it out"):
        trace(variant_of("logits_transform", lambda self, x, at: x.item()))
