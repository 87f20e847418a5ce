"""Texts of C++ expressions mean what they were made of, whatever stands in whatever."""

from __future__ import annotations

import ctypes
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest

import warploom as wl
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.lowering.cpp_text import Text, atom, call, choice, infix, number, prefix
from warploom.testing import check

NAMES = {"a": 5, "b": -3, "c": 1, "d": 0}
COMPARE: dict[str, Callable[[int, int], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "&": operator.and_,
    "|": operator.or_, "^": operator.xor,
}  # fmt: skip


def expression(rng: random.Random, depth: int) -> tuple[Text, int]:
    """A random expression of integers, and its value as Python computes it."""
    if depth == 0:
        name = rng.choice([*NAMES, 2, -7])
        if isinstance(name, str):
            return atom(name), NAMES[name]
        return number(str(name)), name
    (left, x), (right, y), (other, z) = (expression(rng, depth - 1) for _ in range(3))
    kind = rng.randrange(7)
    if kind == 0:
        return choice(left, right, other), y if x else z
    if kind == 1:
        return prefix("-", left), -x
    if kind == 2:
        return prefix("!", left), int(not x)
    if kind == 3:
        return call("id", left), x
    if kind == 4:  # C++'s division rounds to zero; by a number that is none
        return infix(left, "/", infix(number("4"), "*", atom("c"))), int(x / 4)
    if kind == 5:
        sign = rng.choice(list(COMPARE))
        return infix(left, sign, right), int(COMPARE[sign](x, y))
    sign = rng.choice(list(ARITHMETIC))
    return infix(left, sign, right), ARITHMETIC[sign](x, y)


def test_random_expressions_have_the_value_they_were_made_for(
    compile_cpp: Callable[..., ctypes.CDLL],
) -> None:
    rng = random.Random(0)
    cases = [expression(rng, rng.randrange(1, 5)) for _ in range(3000)]
    cases = [(text, value) for text, value in cases if abs(value) < 2**40]
    names = "".join(f"static const long long {name} = {value};" for name, value in NAMES.items())
    body = ", ".join(f"(long long)({text.text})" for text, _ in cases)
    library = compile_cpp(
        f"static long long id(long long x) {{ return x; }} {names}\n"
        f"extern \"C\" const long long values[] = {{ {body} }};",
        "-w",
    )  # fmt: skip
    values = (ctypes.c_longlong * len(cases)).in_dll(library, "values")
    wrong = [(t.text, value, found) for (t, value), found in zip(cases, values) if value != found]  # noqa: B905
    assert wrong == []
    assert len(cases) > 2500


class ChoiceByChoice(wl.Variant):
    """A boolean choice decides, one is chosen, and one is negated."""

    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        near = wl.where(at.q_head == 0, at.kv_pos < 5, at.kv_pos > 9)
        return wl.where(near, logits + 3.0, wl.where(~near, logits, -logits))

    def logits_mask(self, at: wl.Position) -> Any:
        odd = wl.where(at.kv_pos % 2 == 0, at.q_pos > 3, at.q_pos < 9)
        even = wl.where(odd, at.kv_pos < at.q_pos, at.kv_pos % 3 == 0)
        return wl.where(even, odd, at.kv_pos < 7) | (at.kv_pos == 0)


def test_choices_that_depend_on_choices_agree_with_the_functors() -> None:
    check(ChoiceByChoice(), dtypes=["float32"], formats=[wl.Ragged()], devices=["cpu"])


@pytest.mark.nvrtc
def test_choices_that_depend_on_choices_are_printed_alike_for_gpus() -> None:
    from warploom.codegen.attention.templates import render_cuda
    from warploom.codegen.compilers.nvrtc import compile_cuda
    from warploom.codegen.source import TileConfig
    from warploom.dsl.types.dtypes import float16
    from warploom.dsl.types.spec import AttentionSpec
    from warploom.dsl.variants.trace import trace
    from warploom.scheduler.model.layout import c_structs

    spec = AttentionSpec(trace(ChoiceByChoice()), 64, 64, float16, wl.Ragged())
    source = render_cuda(spec, TileConfig(64, 64, 4, 2), c_structs())
    assert "?" in source.text
    assert compile_cuda(source.text, ARCHS["sm_80"])
