"""Logits pressed smoothly into a band, as in Gemma 2."""

from __future__ import annotations

from warploom.dsl.library.numbers import check_positive
from warploom.dsl.values.functions import maximum, tanh
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar
from warploom.dsl.variants.variant import Variant

_LEAST = 1e-30


class SoftCap(Variant):
    """logits -> cap * tanh(logits / cap).

    Args:
        cap: the bound, in units of scaled logits; above 0. Without a soft-cap, leave `SoftCap` out.
            A value given later, to `plan` or `run`, is not checked: its sign does not matter, and 0
            makes all weights equal.

    Raises:
        ArgumentError: a cap that is not above 0 or not finite.
    """

    cap = Scalar("float32")

    def __init__(self, cap: float) -> None:
        self.cap = cap
        check_positive("; leave SoftCap out to switch it off", cap=self.cap)

    def logits_transform(self, logits: Value, at: Position) -> Value:
        # What is surely above 0 can be the softmax's own factor (codegen/lowering/logits_scale.py).
        cap = maximum(abs(self.cap), _LEAST)
        return cap * tanh(logits / cap)
