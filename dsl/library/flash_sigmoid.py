"""Sigmoid in the place of softmax (Ramapuram et al. 2024)."""

from __future__ import annotations

from warploom.dsl.values.functions import sigmoid
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar
from warploom.dsl.variants.variant import Variant


class FlashSigmoid(Variant):
    """Sums sigmoid(logits * scale + bias) * value over visible keys, without normalising.

    Args:
        scale: factor of the logits, which come scaled by sm_scale already.
        bias: added to them; the paper uses -log(kv_len).
    """

    softmax = False
    scale = Scalar("float32")
    bias = Scalar("float32")

    def __init__(self, scale: float = 1.0, bias: float = 0.0) -> None:
        self.scale = scale
        self.bias = bias

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return sigmoid(logits * self.scale + self.bias)
