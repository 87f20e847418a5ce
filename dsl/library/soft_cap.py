"""Logits pressed smoothly into a band, as in Gemma 2."""

from __future__ import annotations

from warploom.dsl.library.numbers import positive
from warploom.dsl.values.functions import maximum, tanh
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar
from warploom.dsl.variants.variant import Variant

_LEAST = 1e-30


def _check_cap(cap: float) -> str | None:
    reason = positive(cap)
    return reason and f"{reason}; leave SoftCap out to switch it off"


class SoftCap(Variant):
    """logits -> cap * tanh(logits / cap).

    Args:
        cap: the bound, in units of scaled logits; above 0. Without a soft-cap, leave `SoftCap` out.

    Raises:
        ArgumentError: a cap that is not above 0 or not finite, wherever it is given.
    """

    cap = Scalar("float32", check=_check_cap)

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def logits_transform(self, logits: Value, at: Position) -> Value:
        # What is surely above 0 can be the softmax's own factor (codegen/lowering/logits_scale.py).
        cap = maximum(abs(self.cap), _LEAST)
        return cap * tanh(logits / cap)
