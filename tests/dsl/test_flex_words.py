"""What is refused in a `score_mod` or `mask_mod` is told in FlexAttention's words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import CannotTrace, GlobalMutated, WarploomError

BIAS, OTHER, TABLE, LONG = (torch.zeros(*shape) for shape in ((16,), (16,), (2, 16), (100,)))
COMPLEX = torch.zeros(16, dtype=torch.complex64)
LISTED, ARRAY = [0.0] * 16, np.zeros(16)
OF_CLASSES = ("logits_", "at.", "functor", "Functor", "field", "Field", "class", "self.", "wl.to_")
KEPT: Any = None


def endless(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    while j > 0:
        j = j - 1
    return score


def counted(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    for _ in range(i):
        score = score + 1
    return score


def nothing(score: Any, b: Any, h: Any, i: Any, j: Any) -> None:
    torch.exp(score)


def asserts(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    assert i < 100
    return score


def prints(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * len(f"{score:.2f}")


SCORE_MODS = [
    (lambda s, b, h, i, j: s if s > 0 else -s, r"Python `if`.*Use where\(condition, a, b\)"),
    (lambda s, b, h, i, j: max(s, 0.0), "minimum and maximum, of warploom or torch"),
    (lambda s, b, h, i, j: s * (1 if j in (1, 2) else 0), "Use where"),
    (asserts, "Use where"),
    (endless, "`while`"),
    (counted, r"loop to a fixed limit, and choose with torch\.where"),
    (lambda s, b, h, i, j: torch.lgamma(s), "may use operators, .* and of torch where, exp"),
    (lambda s, b, h, i, j: s + "1", "may use operators"),
    (lambda s, b, h, i, j: s.q_pos, "may use operators"),
    (lambda s, b, h, i, j: torch.vmap(lambda x: x)(s), "may use operators"),
    (lambda s, b, h, i, j: torch.softmax(s, -1), "one query and one key at a time: .*captured"),
    (lambda s, b, h, i, j: s + torch.searchsorted(BIAS, s), "index it as a captured tensor"),
    (lambda s, b, h, i, j: s + torch.take(BIAS, j), r"Index the tensor: table\[i\]"),
    (lambda s, b, h, i, j: torch.tril(s), "Compare positions, as in q_idx >= kv_idx"),
    (lambda s, b, h, i, j: s * torch.isin(j, BIAS), r"Write \(x == a\) \| \(x == b\)"),
    (lambda s, b, h, i, j: s * math.exp(i), r"Write torch\.exp, which"),
    (lambda s, b, h, i, j: s * float(i), r"Leave it out, or write x\.float\(\)"),
    (lambda s, b, h, i, j: s + BIAS[i].item(), "Leave it out: what is read"),
    (lambda s, b, h, i, j: s + LISTED[i], "no Python list or dict: make a tensor"),
    (lambda s, b, h, i, j: s + {0: 1.0}[h], "no Python list or dict: make a tensor"),
    (lambda s, b, h, i, j: s[0], "one query and one key: its arguments.*single numbers"),
    (lambda s, b, h, i, j: s + len(i), "single numbers, without elements or a length"),
    (lambda s, b, h, i, j: s @ TABLE, "multiply q, k or v by the matrix before the call"),
    (prints, r"call the function with numbers, as in score_mod\(torch\.tensor"),
    (lambda s, b, h, i, j: s + torch.rand(()), "^score_mod of .*make them before, outside"),
    (lambda s, b, i, j: s, r"score_mod of flex takes \(s, b, i, j\); expected \(score, b, h, q"),
    (nothing, r"^score_mod of flex_nothing returned None \(is a return missing\?\)"),
    (lambda s, b, h, i, j: i >= j, "returned a bool; .*Is it a mask. Then give it as mask_mod"),
]  # fmt: skip
OF_TENSORS = [
    (lambda s, b, h, i, j: s + BIAS, r"score_mod of .*without an index; .*number: BIAS\[kv_idx\]"),
    (lambda s, b, h, i, j: s + ARRAY, r"without an index; .*Index the tensor .*ARRAY\[kv_idx\]"),
    (lambda s, b, h, i, j: s + TABLE[h], r"without an index; .*number: TABLE\[h, kv_idx\]"),
    (lambda s, b, h, i, j: s + (BIAS + OTHER)[j], r"Index BIAS\[kv_idx\], OTHER\[kv_idx\] first"),
    (lambda s, b, h, i, j: s + (2 * BIAS)[j], r"Index BIAS\[kv_idx\] first, and compute then"),
    (lambda s, b, h, i, j: s + LONG, r"the whole of it .*Index it for one number: LONG\[kv_idx\]"),
    (lambda s, b, h, i, j: s * TABLE, r"the whole of it .*Index it .* as in TABLE\[h, kv_idx\]"),
    (lambda s, b, h, i, j: BIAS, r"returned the whole of captured tensor 'BIAS'.*Index it with"),
    (lambda s, b, h, i, j: s + BIAS[h, i], r"2 of 1 indices.*as in BIAS\[kv_idx\]"),
    (lambda s, b, h, i, j: s + BIAS[i / 2], "'BIAS' .*: indexing it by float32 .*divide by //"),
    (lambda s, b, h, i, j: s + BIAS[i > 2], r"'BIAS' .*by bool .*torch\.where\(x, a, b\)"),
    (lambda s, b, h, i, j: s + COMPLEX[i], "captured tensor 'COMPLEX' of torch.complex64"),
    (lambda s, b, h, i, j: s.add_(BIAS[i]), "in place"),
]
MASK_MODS = [
    (lambda b, h, i, j: i >= j and i < 9, r"Use where.*and &, \|, ~ for logic"),
    (lambda b, h, i, j: 0 <= i - j < 9, r"\(a <= b\) & \(c < d\)"),
    (lambda b, h, i, j: not i < j, "&, |, ~ for logic"),
    (lambda b, h, i, j: (i - j) * 1.0, "mask_mod of .* a float32; expected a bool. Compare, as in"),
    (lambda b, h, i, j: torch.where(i >= j, 0.0, -math.inf), "added to scores .*in a score_mod"),
    (lambda b, h, i, j: i - j, "returned an int32; .*Compare, as in q_idx >= kv_idx"),
    (lambda b, h, i, j: BIAS > 0, r"^mask_mod of .*without an index; .*BIAS\[kv_idx\]"),
    (lambda s, b, h, i, j: i >= j, r"mask_mod of flex takes \(s, b, .*expected \(b, h, q_idx, kv"),
]


@pytest.mark.parametrize(("score_mod", "text"), SCORE_MODS + OF_TENSORS)
def test_score_mods_are_refused_in_words_of_flex(score_mod: Any, text: str) -> None:
    with pytest.raises(WarploomError, match=text) as caught:
        wl.flex(score_mod)
    _speaks_of_flex(caught.value)


@pytest.mark.parametrize(("mask_mod", "text"), MASK_MODS)
def test_mask_mods_are_refused_in_words_of_flex(mask_mod: Any, text: str) -> None:
    with pytest.raises(WarploomError, match=text) as caught:
        wl.flex(None, mask_mod)
    _speaks_of_flex(caught.value)


def _speaks_of_flex(error: Exception) -> None:
    told, *_ = str(error).splitlines()
    told = told.replace("write a variant class with a wl.Output", "")
    told = told.replace("<class 'warploom", "")  # of torch's own error
    assert [word for word in OF_CLASSES if word in told] == []


def test_a_value_that_is_kept_is_a_change() -> None:
    def keeps(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        global KEPT
        KEPT = score
        return score

    try:
        with pytest.raises(GlobalMutated, match="score_mod of flex_keeps changed 'KEPT'"):
            wl.flex(keeps)
    finally:
        globals()["KEPT"] = None


def test_a_parameter_of_a_module_that_is_called_is_to_be_indexed() -> None:
    class Biased(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(16))

        def forward(self, score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + self.bias

    with pytest.raises(CannotTrace, match="Index it, with one int for each of its dimensions"):
        wl.flex(Biased())


def test_classes_beside_functions_are_told_in_their_own_words() -> None:
    class Sums(wl.Variant):
        def logits_transform(self, logits: Any, at: wl.Position) -> Any:
            return torch.cumsum(logits, 0)

    chain = wl.flex(lambda s, b, h, i, j: 2 * s) & Sums()
    with pytest.raises(CannotTrace, match="read it from a Tensor field"):
        wl.attention(*torch.zeros(3, 1, 2, 1, 8), variant=chain)
