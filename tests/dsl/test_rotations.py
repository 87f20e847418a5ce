"""Rotations turn an even number of lanes, and no more than a vector has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import warploom as wl
from warploom import errors
from warploom.dsl.types.ir import Kind, node, var
from warploom.dsl.values.symbols import Symbol
from warploom.dsl.variants.trace import trace

VECTOR = Symbol(node("element", Kind.FLOAT, (var("lane"),)))
ROTATIONS = [wl.rotate_half, wl.rotate_pairs]


class Turned(wl.Variant):
    def __init__(self, dim: Any) -> None:
        self.dim = dim

    def value_transform(self, v: Any, at: wl.Position) -> Any:
        return wl.rotate_pairs(wl.rotate_half(v, 4), self.dim)


@pytest.mark.parametrize("dim", [3, 0, -2, 2.0, True, "8"])
def test_a_width_is_an_even_int(dim: Any, placed: Any) -> None:
    for given in (VECTOR, np.zeros((3, 8))):
        for rotate in ROTATIONS:
            with pytest.raises(errors.ArgumentError, match=r"dim: is .*an even int of at least 2"):
                rotate(given, dim)
    with pytest.raises(errors.ArgumentError, match="an even int of at least 2") as caught:
        wl.Rope(dim=dim)
    assert placed(caught.value, "wl.Rope(dim=dim)")


def test_any_even_int_is_a_width() -> None:
    width: Any = np.int64(4)
    assert wl.rotate_half(VECTOR, width).node is wl.rotate_half(VECTOR, 4).node
    assert trace(wl.Rope(dim=width)) == trace(wl.Rope(dim=4))


def test_arrays_are_not_rotated_past_their_end() -> None:
    for rotate in ROTATIONS:
        with pytest.raises(errors.ArgumentError, match="12 lanes are rotated, but head_dim is 8"):
            rotate(np.zeros((3, 8)), 12)
        with pytest.raises(errors.ArgumentError, match="dim: is 7; expected an even int"):
            rotate(np.zeros((3, 7)))
    x = np.zeros((3, 2, 8))
    with pytest.raises(errors.ArgumentError, match="12 lanes are rotated, but head_dim is 8"):
        wl.reference_attention(wl.Rope(dim=12, interleaved=True), x, x, x)


def test_a_trace_knows_the_widest_rotation_of_each_hook() -> None:
    assert trace(Turned(8)).rotated == (("value_transform", 8),)
    both = trace(wl.Rope(dim=16) & Turned(2))
    assert dict(both.rotated) == {
        "query_transform": 16, "key_transform": 16, "value_transform": 4,
    }  # fmt: skip
    assert trace(wl.Rope()).rotated == ()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"scaling": "yarn"}, "scaling: is 'yarn'; expected None, LinearScaling"),
        ({"scaling": {"type": "linear"}}, r"scaling: is \{'type': 'linear'\}; .*YarnScaling"),
        ({"scaling": wl.LinearScaling}, "scaling: is the class LinearScaling; .*Linear"),
        ({"positions": "x"}, "positions: 'x' is neither 'cache' nor 'sequence'"),
    ],
)
def test_options_of_rope(given: Any, text: str) -> None:
    with pytest.raises(errors.ArgumentError, match=text):
        wl.Rope(**given)
