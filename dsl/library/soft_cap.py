"""Logits pressed smoothly into a band, as in Gemma 2."""

from __future__ import annotations

from warploom.dsl.fields import Scalar
from warploom.dsl.functions import tanh
from warploom.dsl.position import Position
from warploom.dsl.symbols import Value
from warploom.dsl.variant import Variant


class SoftCap(Variant):
    """logits -> cap * tanh(logits / cap).

    Args:
        cap: the bound, in units of scaled logits.
    """

    cap = Scalar("float32")

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return self.cap * tanh(logits / self.cap)
