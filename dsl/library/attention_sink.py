"""A learned logit in the softmax's denominator that no value belongs to (gpt-oss)."""

from __future__ import annotations

import math
from typing import Any

from warploom.dsl.values.functions import sigmoid, where
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Tensor
from warploom.dsl.variants.variant import Variant


class AttentionSink(Variant):
    """Adds exp(sink[q_head]) to each row's denominator.

    The denominator was exp(lse), so the output shrinks by exp(lse) / (exp(lse) + exp(sink)), which
    is sigmoid(lse - sink). A row that sees nothing has output 0. The log-sum-exp given out is that
    of the keys alone.

    Args:
        sink: [num_q_heads] float32, -inf for a head without one; None leaves it to be given at run
            time.
    """

    softmax = True
    sink = Tensor("float32", ("q_head",))

    def __init__(self, sink: Any = None) -> None:
        if sink is not None:
            self.sink = sink

    def output_transform(self, o: Value, at: Position) -> Value:
        shrunk = o * sigmoid(at.lse - self.sink[at.q_head])
        return where(at.lse > -math.inf, shrunk, o)  # no keys and no sink: -inf - -inf
