"""Errors that torch, NumPy and Python raise when they meet a symbol become errors of ours."""

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import CannotTrace

BIAS, ARRAY = torch.zeros(8, 8), np.zeros((8, 8), np.float32)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def to_captured(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    BIAS[i, j] = 0
    return score


def added_to_captured(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    BIAS[i, j] += 1
    return score


def to_array(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    ARRAY[i, j] = 0
    return score


def to_own(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    table = torch.zeros(8)
    table[i] = 1.0
    return score


def to_score(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    score[0] = 1.0
    return score


@pytest.mark.parametrize("mod", [to_captured, added_to_captured, to_array, to_own, to_score])
def test_assigning_in_a_mod_says_what_to_write(mod: Any, source: Any) -> None:
    with pytest.raises(CannotTrace, match="mask_mod changes nothing: return") as caught:
        wl.flex(mod)
    assert source(caught.value).file == __file__


class Assigns(wl.Variant):
    table = wl.Tensor("float32", ("q_head", None))
    how = "set"

    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        if self.how == "set":
            self.table[at.q_head, 0] = 1.0
        elif self.how == "add":
            self.table[at.q_head, 0] += 1.0
        else:
            del self.table[at.q_head]
        return logits


@pytest.mark.parametrize("how", ["set", "add", "delete"])
def test_assigning_to_a_field_says_what_to_write(how: str, source: Any) -> None:
    variant = Assigns(table=torch.zeros(1, 4))
    variant.how = how
    with pytest.raises(CannotTrace, match="tensor field 'table': assigning to it") as caught:
        wl.attention(*torch.zeros(3, 1, 2, 1, 8), variant=variant)
    assert source(caught.value).function == "logits_transform"


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda x: torch.vmap(lambda y: y * 2)(x), "ValueError"),
        (lambda x: torch.func.grad(lambda y: y * 2)(x), "ValueError"),
        (lambda x: torch.cond(x > 0, lambda y: y, lambda y: -y, (x,)), "RuntimeError"),
        (lambda x: torch.from_numpy(x), "TypeError"),
        (lambda x: torch.Tensor(x), "RuntimeError"),
        (lambda x: torch.where(x > 0, x, cast("Any", "x")), "TypeError"),
        (lambda x: torch.testing.assert_close(x, x), "TypeError"),
        (lambda x: memoryview(x), "TypeError"),
        (lambda x: pow(x, 2, 3), "TypeError"),
        (lambda x: setattr(x, "extra", 1), "AttributeError"),
    ],
)
def test_errors_of_others_name_the_users_line(use: Any, told: str, source: Any) -> None:
    with pytest.raises(CannotTrace, match=f"what raised {told} .*mask_mod may use") as caught:
        wl.flex(lambda score, b, h, i, j: use(score))
    assert source(caught.value).file == __file__
    assert type(caught.value.__cause__).__name__ == told


def test_errors_of_the_functor_itself_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError):
        wl.flex(lambda score, b, h, i, j: score + 1 / 0)
    with pytest.raises(KeyError):
        wl.flex(lambda score, b, h, i, j: score + copy.copy({})["none"])


def test_functions_with_a_backward_of_their_own_are_traced() -> None:
    q, k, v = torch.randn(3, 1, 5, 1, 8)
    found = wl.attention(q, k, v, variant=wl.flex(lambda s, b, h, i, j: Twice.apply(s)))
    expected = wl.attention(q, k, v, variant=wl.flex(lambda s, b, h, i, j: s * 2))
    torch.testing.assert_close(found, expected)


def test_a_variant_inside_a_compiled_function_says_where_to_make_it() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return wl.attention(x, x, x, variant=wl.flex(lambda s, b, h, i, j: s + 1.0))

    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"made outside of the compiled function: call wl\.flex"):
        compiled(torch.zeros(1, 2, 1, 8))
