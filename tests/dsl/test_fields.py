"""Scalar and Tensor fields: declaration, binding, indexing, and their mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.dsl.reference import reference_attention, visible
from warploom.dsl.variants.trace import trace
from warploom.errors import (
    CannotTrace,
    FieldMisuse,
    MissingInput,
    UndeclaredField,
    UnknownInput,
    WarploomError,
    WrongResult,
)

# wrong on purpose, out of the type checkers' sight
ANY: dict[str, Any] = {"x": "x", "batch": "batch", "several": np.zeros(2)}


class Biased(wl.Variant):
    cap = wl.Scalar("float32", default=50.0)
    window = wl.Scalar("int32")
    bias = wl.Tensor("float32", ("q_head", None))
    ids = wl.Tensor("int32", ("batch", "kv_pos"))

    def logits_transform(self, logits, at):
        return logits + self.bias[at.q_head, at.kv_pos % 3] * self.cap

    def logits_mask(self, at):
        same = self.ids[at.batch, at.q_pos] == self.ids[at.batch, at.kv_pos]
        return same & (at.q_pos - at.kv_pos < self.window)


def test_fields_are_listed_in_order_and_traced_as_declared() -> None:
    assert list(Biased().fields()) == ["cap", "window", "bias", "ids"]
    traced = trace(Biased())
    assert [(f.name, f.dtype.name, f.default) for f in traced.scalars] == [
        ("cap", "float32", 50.0),
        ("window", "int32", None),
    ]
    assert [(f.name, f.dtype.name, f.axes) for f in traced.tensors] == [
        ("bias", "float32", ("q_head", None)),
        ("ids", "int32", ("batch", "kv_pos")),
    ]


def test_values_are_bound_at_construction_and_never_traced() -> None:
    bias = np.ones((2, 3), np.float32)
    bound = Biased(window=4, bias=bias)
    assert bound.inputs() == {"window": 4, "bias": bias}
    assert bound.window == 4 and bound.cap == 50.0
    assert trace(bound) == trace(Biased())
    assert repr(bound) == "Biased(window=4, bias=<ndarray (2, 3)>)"


def test_a_constructor_of_ones_own_needs_no_super() -> None:
    class Mine(wl.Variant):
        cap = wl.Scalar("float32")

        def __init__(self, cap):
            self.cap = cap
            self.other = "anything"

    assert Mine(3).inputs() == {"cap": 3.0}
    assert Mine(torch.tensor(2.5)).inputs() == {"cap": 2.5}


def test_fields_are_inherited_and_may_be_overridden() -> None:
    class More(Biased):
        extra = wl.Scalar("bool", default=False)
        cap = wl.Scalar("float32", default=1.0)

    assert list(More().fields()) == ["cap", "window", "bias", "ids", "extra"]
    assert More().cap == 1.0


def test_dtypes_of_torch_and_numpy_are_accepted() -> None:
    assert wl.Scalar(torch.float32).dtype.name == "float32"
    assert wl.Tensor(torch.bfloat16, ("lane",)).dtype.name == "bfloat16"
    assert wl.Tensor(np.dtype("int32"), (None,)).dtype.name == "int32"


@pytest.mark.parametrize(
    ("declare", "reason"),
    [
        (lambda: wl.Scalar("float99"), "float99"),
        (lambda: wl.Scalar("int32", default=0.5), "got 0.5; expected int32"),
        (lambda: wl.Scalar("float32", default=ANY["x"]), "got str; expected a number"),
        (lambda: wl.Tensor("float32", ("head",)), "'head' is none of batch, q_head"),
        (lambda: wl.Tensor("float32", ANY["batch"]), "write ('batch',)"),
        (lambda: Biased(window=0.5), "got 0.5; expected int32"),
        (
            lambda: Biased(window=np.zeros(2)),
            "(2,); expected a number. For several, declare the field as Tensor('int32', axes)",
        ),
        (lambda: wl.SlidingWindow(9, sinks=ANY["several"]), "as wl.AttentionSink does"),
        (lambda: Biased(bias=np.zeros(3)), "got shape (3,); expected 2 dimensions"),
        (lambda: Biased(bias=3.0), "got float; expected an array"),
        (lambda: Biased().window, "no value outside a kernel"),
    ],
)
def test_wrong_declarations_and_values(declare, reason, source) -> None:
    with pytest.raises(FieldMisuse) as caught:
        declare()
    assert reason in str(caught.value)
    assert source(caught.value).file == __file__ and "lambda" in source(caught.value).text


@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        (wl.SlidingWindow, 2.5, "got 2.5; expected int32. Give a whole number."),
        (wl.SlidingWindow, float("nan"), "got nan; expected int32. Give a whole number."),
        (wl.SoftCap, None, "got NoneType; expected a number. Give a Python number"),
        (wl.PrefixLM, 5, "an array [batch]. Give a tensor, such as torch.tensor(..., dtype="),
        (
            wl.DocumentMask,
            np.zeros(4),
            "got shape (4,); expected 2 dimensions [batch, kv_pos].",
        ),
        (wl.DocumentMask, np.zeros((1, 4, 1)), "Take one of it, or reshape it."),
    ],
)
def test_wrong_values_for_shipped_variants_point_at_the_call(make, given, text, source, placed):
    """Not into the variant's own file, where there is nothing to mend."""
    with pytest.raises(FieldMisuse) as caught:
        make(given)
    assert text in str(caught.value)
    assert source(caught.value).file == __file__ and placed(caught.value, "make(given)")


def test_reserved_names() -> None:
    for name in ("softmax", "logits_mask", "inputs", "_hidden"):
        # Python before 3.12 wraps errors of __set_name__
        with pytest.raises((FieldMisuse, RuntimeError)):
            type("Reserved", (wl.Variant,), {name: wl.Scalar("float32")})

    class Sizes(wl.Variant):
        t = wl.Tensor("float32", (None,))
        t_n0 = wl.Scalar("int32")

    with pytest.raises(FieldMisuse, match="taken by tensor 't'"):
        trace(Sizes())


class Constant(wl.Variant):
    window = 32


def test_unknown_and_missing_inputs() -> None:
    known = r"no input 'cpa'\. Did you mean 'cap'\? It takes: cap, window, bias, ids"
    with pytest.raises(UnknownInput, match=known):
        Biased(cpa=3)
    with pytest.raises(UnknownInput, match=r"Scalar\('int32', default=32\)\. It takes: nothing"):
        Constant(window=3)
    with pytest.raises(UnknownInput, match="no input 'windo'"):
        visible(Biased(), q_len=1, kv_len=1, inputs={"windo": 3})
    with pytest.raises(MissingInput, match=r"Biased reads 'ids'.*int32 tensor"):
        visible(Biased(window=3), q_len=1, kv_len=1)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (lambda at, t: t[at.q_head], "got 1 indices; it has 2 dimensions (q_head, any)"),
        (lambda at, t: t[at.kv_head, at.kv_pos], "axis 'q_head' is indexed by at.q_head"),
        (lambda at, t: t[at.q_head + 0, at.kv_pos], "axis 'q_head' is indexed by at.q_head"),
        (lambda at, t: t[at.q_head, at.kv_pos / 2], "an index is float32, not an int"),
        (lambda at, t: t[at.q_head, :], "not by slices"),
        (lambda at, t: t[at.q_head, -1], "index -1 is negative"),
    ],
)
def test_wrong_indices(index, reason, placed) -> None:
    class Wrong(wl.Variant):
        t = wl.Tensor("float32", ("q_head", None))

        def logits_transform(self, logits, at):
            return logits + index(at, self.t)

    with pytest.raises(FieldMisuse) as caught:
        trace(Wrong())
    assert reason in str(caught.value) and "'t' of Wrong" in str(caught.value)
    assert placed(caught.value, "t[")


def test_a_tensor_field_is_only_indexed() -> None:
    class Shape(wl.Variant):
        t = wl.Tensor("float32", ("q_head",))

        def logits_transform(self, logits, at):
            return logits + self.t.shape[0]

    with pytest.raises(CannotTrace, match=r"'t': its attribute \.shape.*pass them as Scalar"):
        trace(Shape())


@pytest.mark.parametrize(
    "use",
    [
        lambda x, t: x + t,
        lambda x, t: t * x,
        lambda x, t: x + wl.exp(t),
        lambda x, t: x + torch.exp(t),
        lambda x, t: wl.where(x > 0.0, t, x),
        lambda x, t: wl.where(t == 0.0, 1.0, x),
        lambda x, t: wl.to_float(t),
        lambda x, t: x + sum(t),
    ],
)
def test_a_tensor_field_taken_whole_is_told_how_to_index_it(use, source) -> None:
    class Whole(wl.Variant):
        t = wl.Tensor("float32", ("q_head", None, "kv_pos"))

        def logits_transform(self, logits, at):
            return use(logits, self.t)

    how = r"tensor field 't': .*such as self\.t\[at\.q_head, index, at\.kv_pos\]"
    with pytest.raises(CannotTrace, match=how) as e:
        trace(Whole())
    assert "lambda x, t" in source(e.value).text
    with pytest.raises(CannotTrace, match=how):
        reference_attention(Whole(t=np.zeros((2, 1, 3))), *np.zeros((3, 3, 2, 8)))


def test_a_tensor_field_that_is_returned_whole() -> None:
    class Whole(wl.Variant):
        t = wl.Tensor("float32", ("q_head",))

        def logits_transform(self, logits, at):
            return torch.stack([self.t]) if stack else self.t

    stack = False
    with pytest.raises(WrongResult, match="returned the whole of tensor field 't'; expected a num"):
        trace(Whole())
    stack = True
    with pytest.raises(CannotTrace, match=r"torch.stack of the whole.*reads one element"):
        trace(Whole())


def test_indices_outside_are_clamped_as_in_the_kernel() -> None:
    class Reads(wl.Variant):
        t = wl.Tensor("int32", (None,))

        def logits_mask(self, at):
            return self.t[at.kv_pos - 2] == 1

    mask = visible(Reads(t=np.array([1, 0, 1])), q_len=1, kv_len=8)
    assert mask.tolist() == [[True, True, True, False, True, True, True, True]]


def test_what_a_class_does_not_declare_is_named_at_the_users_line() -> None:
    class Misspelt(wl.Variant):
        temperature = wl.Scalar("float32", default=1.0)

        def logits_transform(self, logits, at):
            assert not hasattr(self, "optional")
            return logits * self.temprature  # pyright: ignore

    with pytest.raises(UndeclaredField, match=r"no 'temprature'.*temprature = Scalar") as caught:
        trace(Misspelt())
    assert "logits * self.temprature" in str(caught.value)
    with pytest.raises(AttributeError, match="'Misspelt' object has no attribute 'temprature'"):
        _ = Misspelt().temprature  # pyright: ignore


class _Swapped(wl.Variant):
    table = wl.Tensor("float32", ("q_head", "kv_pos"))

    def logits_transform(self, logits, at):
        return logits + self.table[at.kv_pos, at.q_head]


class _AtFirst(wl.Variant):
    def logits_mask(at, self):  # pyright: ignore
        return at.kv_pos > 3  # pyright: ignore


class _Scaled(wl.Variant):
    factor = wl.Scalar("float32")


_TENSOR: Any = wl.Tensor  # for calls that type checkers refuse
_SCALAR: Any = wl.Scalar
_CAUSAL: Any = wl.Causal
_ROPE: Any = wl.Rope
_SCALED: Any = _Scaled


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: trace(_Swapped()),
            r"dimension 0 has the axis 'q_head' and is indexed by at\.kv_pos\. Index it by "
            r"at\.q_head \(are the indices swapped\?\), or declare None",
        ),
        (
            lambda: trace(_AtFirst()),
            r"at\.kv_pos\. A functor takes self first and the position last",
        ),
        (lambda: wl.Tensor("float32", ("head", "kv")), "^argument 'axes' of wl.Tensor: 'head' is"),
        (
            lambda: _TENSOR("float32", None),
            r"'axes' of wl.Tensor: None is no tuple; .*\(None,\)",
        ),
        (lambda: _TENSOR("float32", 3), "'axes' of wl.Tensor: 3 is no tuple; give one axis"),
        (lambda: _TENSOR("float32"), r"wl.Tensor\(\): missing .*'axes'.* Write wl.Tensor\('fl"),
        (lambda: _TENSOR("float32", axis=("lane",)), r"wl.Tensor\(\): missing .* Write wl.Tens"),
        (lambda: _TENSOR("int32", (None,), 3), r"wl.Tensor\(\): too many .* Write wl.Tensor"),
        (lambda: _SCALAR(), r"wl.Scalar\(\): missing .*'dtype'. Write wl.Scalar\('float32'\)"),
        (lambda: wl.Scalar("f3"), "^argument 'dtype' of wl.Scalar: 'f3' is none of"),
        (lambda: _TENSOR("float32", ("lane",), default=1), "a tensor has no default value"),
        (lambda: _SCALED(3.0), r"got 3\.0; its fields are given by name\. Write _Scaled\(factor="),
        (lambda: _CAUSAL(3), "got 3; it has no fields and takes nothing"),
        (lambda: _ROPE("x"), "field 'rope_theta' of Rope: got str; expected a number"),
        (lambda: wl.Causal() + wl.Causal(), r"chain them with &, as in `a & b`"),
        (lambda: 1 + wl.Causal(), "chain them with &"),
    ],
)
def test_mistakes_are_told_with_what_to_write(make, text) -> None:
    with pytest.raises(WarploomError, match=text):
        make()
