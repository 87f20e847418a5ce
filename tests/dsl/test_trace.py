"""Tracing: what is kept, when two traces are equal, and each mistake with its place."""

from __future__ import annotations

import numpy as np
import pytest

import warploom as wl
from warploom.dsl.reference import reference_attention
from warploom.dsl.types.ir import walk
from warploom.dsl.types.spec import HOOKS
from warploom.dsl.values.position import AVAILABLE
from warploom.dsl.variants.trace import trace
from warploom.errors import (
    BranchOnSymbol,
    CannotTrace,
    UnknownHook,
    WrongResult,
    WrongSignature,
)


class Everything(wl.Variant):
    slopes = wl.Tensor("float32", ("q_head",))
    unread = wl.Tensor("float32", ("q_head",))
    cap = wl.Scalar("float32", default=3.0)
    dead = wl.Scalar("float32", default=0.0)

    def query_transform(self, q, at):
        return wl.rotate_half(q) * at.lane

    def key_transform(self, k, at):
        return k * at.kv_pos

    def value_transform(self, v, at):
        return v

    def logits_transform(self, logits, at):
        _ = self.dead * 2.0
        return wl.tanh(logits / self.cap) + self.slopes[at.q_head]

    def logits_mask(self, at):
        return at.kv_pos <= at.q_pos

    def output_transform(self, o, at):
        return o * wl.sigmoid(at.lse)


def test_only_what_is_not_the_identity_is_kept() -> None:
    traced = trace(Everything())
    assert list(traced.hooks) == [hook for hook in HOOKS if hook != "value_transform"]
    assert [field.name for field in traced.scalars] == ["cap"]
    assert [field.name for field in traced.tensors] == ["slopes"]
    assert traced.name == "Everything" and traced.softmax
    assert trace(wl.Variant()).hooks == {}


def test_equal_variants_give_equal_traces_whatever_their_values() -> None:
    one, two = trace(wl.SoftCap(50.0)), trace(wl.SoftCap(30.0))
    assert one == two and hash(one) == hash(two)
    assert one.hooks["logits_transform"] is two.hooks["logits_transform"]
    assert trace(wl.Causal()) != one


def test_an_edited_helper_or_closure_is_never_stale() -> None:
    factor = [2.0]

    class Scaled(wl.Variant):
        def logits_transform(self, logits, at):
            return logits * factor[0]

    first = trace(Scaled())
    factor[0] = 3.0
    assert trace(Scaled()) != first
    factor[0] = 2.0
    assert trace(Scaled()) == first


def test_configuration_may_branch_but_symbols_may_not(placed) -> None:
    class Either(wl.Variant):
        def __init__(self, bias):
            self.bias = bias

        def logits_transform(self, logits, at):
            return logits + 1.0 if self.bias else logits

    assert "logits_transform" in trace(Either(True)).hooks
    assert trace(Either(False)).hooks == {}

    class Branching(wl.Variant):
        def logits_transform(self, logits, at):
            if logits > 0:
                return logits
            return 0.0

    with pytest.raises(BranchOnSymbol) as caught:
        trace(Branching())
    assert placed(caught.value, "logits > 0")


@pytest.mark.parametrize("hook", HOOKS)
def test_positions_of_another_hook_are_refused(hook, placed) -> None:
    names = {name for hooks in AVAILABLE.values() for name in hooks}
    for name in sorted(names):
        functor = {
            "logits_mask": lambda self, at, name=name: getattr(at, name) > 0,
        }.get(hook, lambda self, x, at, name=name: x + getattr(at, name))
        variant = type("Reads", (wl.Variant,), {hook: functor})()
        if name in AVAILABLE[hook]:
            assert hook in trace(variant).hooks
            continue
        with pytest.raises(CannotTrace) as caught:
            trace(variant)
        assert f"at.{name} in {hook}" in str(caught.value)
        assert placed(caught.value, "getattr(at, name)")


def test_a_misspelt_position_is_explained(placed) -> None:
    class Typo(wl.Variant):
        def logits_mask(self, at):
            return at.kvpos <= at.q_pos

    with pytest.raises(CannotTrace, match=r"Did you mean at\.kv_pos") as caught:
        trace(Typo())
    assert placed(caught.value, "at.kvpos")

    class Writes(wl.Variant):
        def logits_mask(self, at):
            at.q_pos = 3
            return True

    with pytest.raises(CannotTrace, match="read-only"):
        trace(Writes())


@pytest.mark.parametrize(("name", "meant"), [("kv_idx", "kv_pos"), ("b", "batch"), ("h", "q_head")])
def test_positions_by_flexattentions_names_are_explained(name, meant) -> None:
    class Foreign(wl.Variant):
        def logits_mask(self, at):
            return getattr(at, name) > 0

    with pytest.raises(CannotTrace, match=rf"Did you mean at\.{meant}[?]"):
        trace(Foreign())


def test_q_idx_counts_the_requests_rows(graph) -> None:
    class Row(wl.Variant):
        def logits_mask(self, at):
            return at.q_idx == 0

    root = trace(Row()).hooks["logits_mask"]
    assert graph(root, {"q_pos": [6, 7], "kv_len": 10, "q_len": 4}).tolist() == [True, False]


# --- results


@pytest.mark.parametrize(
    ("hook", "result", "got"),
    [
        ("logits_mask", lambda at: at.kv_pos - at.q_pos, "an int32"),
        ("logits_mask", lambda at: 1, "an int32"),
        ("logits_mask", lambda at: None, "None"),
        ("logits_transform", lambda at: at.kv_pos < 3, "a bool"),
        ("logits_transform", lambda at: (at.kv_pos, 1), "a tuple"),
        ("query_transform", lambda at: at.q_pos < 3, "a bool"),
        ("output_transform", lambda at: None, "None"),
        ("value_transform", lambda at: "v", "a str"),
    ],
)
def test_wrong_results(hook, result, got, source) -> None:
    def functor(self, *args):
        return result(args[-1])

    with pytest.raises(WrongResult) as caught:
        trace(type("Wrong", (wl.Variant,), {hook: functor})())
    assert f"{hook} of Wrong returned {got}" in str(caught.value)
    assert source(caught.value).file == __file__


def test_a_wrong_result_points_where_it_was_made(placed) -> None:
    class Wrong(wl.Variant):
        def logits_mask(self, at):
            distance = at.q_pos - at.kv_pos
            return distance

    with pytest.raises(WrongResult) as caught:
        trace(Wrong())
    assert placed(caught.value, "at.q_pos - at.kv_pos")

    class Forgotten(wl.Variant):
        def logits_transform(self, logits, at):
            _ = logits * 2.0

    with pytest.raises(WrongResult, match="is a return missing") as caught:
        trace(Forgotten())
    assert placed(caught.value, "def logits_transform")


def test_whole_number_results_become_floats() -> None:
    class Distance(wl.Variant):
        def logits_transform(self, logits, at):
            return at.kv_pos

        def value_transform(self, v, at):
            return 0

    hooks = trace(Distance()).hooks
    assert {root.kind.value for root in hooks.values()} == {"float32"}


# --- declarations


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("logit_transform", "logits_transform"),
        ("logits_masks", "logits_mask"),
        ("querry_transform", "query_transform"),
        ("score_mod", "logits_transform"),
        ("mask_mod", "logits_mask"),
    ],
)
def test_misspelt_hooks(name, suggestion, placed) -> None:
    def functor(self, x, at):
        return x

    with pytest.raises(UnknownHook, match=f"{name!r}.*{suggestion!r}") as caught:
        trace(type("Typo", (wl.Variant,), {name: functor})())
    assert placed(caught.value, "def functor")


def test_misspelt_softmax_and_allowed_helpers() -> None:
    class Flag(wl.Variant):
        soft_max = False

    with pytest.raises(UnknownHook, match="'softmax'"):
        trace(Flag())

    class Helpers(wl.Variant):
        def distance(self, at):
            return at.q_pos - at.kv_pos

        def _query_transform(self, q):
            return q

        def logits_mask(self, at):
            return self.distance(at) < 8

    assert list(trace(Helpers()).hooks) == ["logits_mask"]


def test_wrong_signatures(placed) -> None:
    class NoPosition(wl.Variant):
        def logits_transform(self, logits):  # pyright: ignore
            return logits

    with pytest.raises(
        WrongSignature, match=r"\(self, logits\); expected \(self, logits, at\)"
    ) as e:
        trace(NoPosition())
    assert placed(e.value, "def logits_transform")

    class TooMany(wl.Variant):
        def logits_mask(self, logits, at):  # pyright: ignore
            return True

    with pytest.raises(WrongSignature, match=r"expected \(self, at\)"):
        trace(TooMany())

    class Swapped(wl.Variant):
        def logits_transform(self, at, logits):  # pyright: ignore
            return logits

    for swapped in (Swapped(), wl.Causal() & Swapped()):  # parts are checked, too
        expected = r"of Swapped takes \(self, at, logits\); expected \(self, logits, at\)"
        with pytest.raises(WrongSignature, match=expected) as e:
            trace(swapped)
        assert placed(e.value, "def logits_transform")


@pytest.mark.parametrize(
    "body",
    [
        lambda value, at: value * 0.5,
        lambda value, at: 1.0 + value,
        lambda value, at: at + value,
        lambda value, at: wl.exp(value),
    ],
)
def test_computing_with_the_position_itself_names_the_order_of_arguments(body) -> None:
    class OtherNames(wl.Variant):
        def logits_transform(self, position, value):  # pyright: ignore
            return body(value, position)

    with pytest.raises(CannotTrace, match=r"the last argument after the value.*such as at\.batch"):
        trace(OtherNames())
    with pytest.raises(CannotTrace, match="the position in logits_transform: computing"):
        reference_attention(OtherNames(), *np.zeros((3, 2, 1, 8)))


def test_errors_of_the_functor_itself_pass_through() -> None:
    class Broken(wl.Variant):
        def logits_mask(self, at):
            return at.kv_pos < no_such_name  # noqa: F821  # pyright: ignore

    with pytest.raises(NameError):
        trace(Broken())


def test_every_made_node_has_a_place() -> None:
    class Placed(wl.Variant):
        def logits_transform(self, logits, at):
            return wl.where(at.kv_pos * 13 > at.q_pos, logits * 0.123, -4.567)

    for found in walk(trace(Placed()).hooks["logits_transform"]):
        if found.args:
            assert found.source is not None and found.source.file.endswith(".py")
