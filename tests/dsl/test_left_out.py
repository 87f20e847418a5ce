"""Fields that an instance lacks: nobody can give them, and no functor reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom as wl
from warploom import errors
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.trace import trace

ROWS = torch.randn(1, 30, 4, 16, generator=torch.Generator().manual_seed(0))


def attend(variant: wl.Variant, **values: Any) -> torch.Tensor:
    return wl.attention(ROWS, ROWS, ROWS, variant=variant, **values)


def window(**sinks: int) -> wl.Variant:
    return wl.Causal() & wl.SlidingWindow(3, **sinks)


def test_a_window_without_sinks_takes_none() -> None:
    assert list(wl.SlidingWindow(3).fields()) == ["left", "right"]
    with pytest.raises(errors.UnknownInput, match=r"no input 'sinks'.*SlidingWindow\(left, sinks"):
        attend(window(), sinks=2)
    with pytest.raises(errors.FieldMisuse, match="made without it"):
        wl.SlidingWindow(3).sinks = 2


def test_sinks_count_in_whatever_order_windows_are_made() -> None:
    plain, sinks = attend(window()), attend(window(sinks=2))
    given = attend(window(sinks=0), sinks=2)
    assert torch.equal(plain, attend(window())) and torch.equal(plain, attend(window(sinks=0)))
    assert torch.equal(sinks, given) and not torch.equal(sinks, plain)


def test_slopes_of_the_paper_take_none() -> None:
    slopes = torch.linspace(0.1, 1, 4)
    with pytest.raises(errors.UnknownInput, match=r"Alibi\('input'\)"):
        attend(wl.Alibi(), slopes=slopes)
    given = attend(wl.Alibi("input"), slopes=slopes)
    assert torch.equal(given, attend(wl.Alibi(slopes)))
    assert not torch.equal(given, attend(wl.Alibi()))


def test_a_functor_that_reads_what_is_left_out_is_refused() -> None:
    class Reads(wl.Variant):
        cap = wl.Scalar("float32")

        def __init__(self) -> None:
            self.left_out = ("cap",)

        def logits_transform(self, logits: Value, at: Position) -> Value:
            return logits * self.cap

    with pytest.raises(errors.FieldMisuse, match="must not read it where it is left out"):
        trace(Reads())


def test_a_chain_takes_no_value_that_a_link_leaves_out() -> None:
    for chain, name in ((window(), "sinks"), (wl.Causal() & wl.Alibi(), "slopes")):
        with pytest.raises(errors.FieldMisuse, match="made without it"):
            setattr(chain, name, 2)


@pytest.mark.parametrize(
    ("names", "text"),
    [("cap", "a tuple"), (("tap",), "no Scalar"), ((1,), "no Scalar"), (("f",), "has a value")],
)
def test_what_is_left_out_is_checked(names: Any, text: str) -> None:
    class Capped(wl.Variant):
        cap = wl.Scalar("float32")
        f = wl.Scalar("float32")

        def __init__(self) -> None:
            self.f = 2.0
            self.left_out = names

    with pytest.raises(errors.FieldMisuse, match=text):
        Capped()
