"""Every functor may read every position that is its own, wherever codegen moves the expression."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import mul
from typing import Any

import pytest

import warploom as wl
from warploom.codegen.attention.templates import SINGLE_ROW, render_cuda
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.values.position import AVAILABLE, Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.trace import trace
from warploom.scheduler.model.layout import c_structs


def numbers(functor: str, at: Position) -> list[Value]:
    """Each position as a number of its own, so that each may be hoisted to a place of its own."""
    return [wl.to_float(getattr(at, name)) * 0.25 for name in AVAILABLE[functor] if name != "lane"]


FORMS: dict[str, Callable[[Value, list[Value], Value], Value]] = {
    "each scales": lambda x, found, lane: reduce(mul, found, x),
    "their sum scales": lambda x, found, lane: x * sum(found),
    "they shift": lambda x, found, lane: x + sum(found) + lane * 0.5,
    "reduced": lambda x, found, lane: x + wl.sum(x * reduce(mul, found) + lane),
}


class ReadsAll(wl.Variant):
    """All functors read all of their positions."""

    def __init__(self, form: str, functors: tuple[str, ...] = tuple(AVAILABLE)) -> None:
        self._form, self._functors = form, functors

    def _vector(self, functor: str, x: Value, at: Position) -> Value:
        if functor not in self._functors:
            return x
        return FORMS[self._form](x, numbers(functor, at), wl.to_float(at.lane))

    def query_transform(self, q: Value, at: Position) -> Value:
        return self._vector("query_transform", q, at)

    def key_transform(self, k: Value, at: Position) -> Value:
        return self._vector("key_transform", k, at)

    def value_transform(self, v: Value, at: Position) -> Value:
        return self._vector("value_transform", v, at)

    def output_transform(self, o: Value, at: Position) -> Value:
        return self._vector("output_transform", o, at)

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return reduce(mul, numbers("logits_transform", at), logits)

    def logits_mask(self, at: Position) -> Value:
        return sum(numbers("logits_mask", at)) > 1.0


def compile_for(
    variant: wl.Variant, choose: Callable[[AttentionSpec], TileConfig], arch: str
) -> Any:
    spec = AttentionSpec(trace(variant), 64, 64, dtype("bfloat16"), wl.Paged(16))
    source = render_cuda(spec, choose(spec), c_structs())
    return run_nvrtc(source.text, arch_named(arch), source.name)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("form", FORMS)
def test_tiles_of_rows(form: str) -> None:
    assert compile_for(
        ReadsAll(form), lambda of: choose_tile(of, arch_named("sm_80"), 16).tile, "sm_80"
    )


@pytest.mark.some(2)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("form", FORMS)
def test_hopper(form: str) -> None:
    tile = TileConfig(64, 64, 4, 2, "hopper")
    assert compile_for(ReadsAll(form), lambda _: tile, "sm_90a")


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("form", ["each scales", "their sum scales"])
def test_one_row(form: str) -> None:
    functors = ("query_transform", "value_transform", "output_transform")
    assert compile_for(ReadsAll(form, functors), SINGLE_ROW.tile, "sm_90a")
