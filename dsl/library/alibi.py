"""Logits biased by distance, with one slope for each head (ALiBi, Press et al. 2022)."""

from __future__ import annotations

from typing import Any

from warploom.dsl.values.functions import exp2, floor, log2, to_float, where
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Tensor
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError


class Alibi(Variant):
    """logits -> logits + slope[q_head] * (kv_pos - q_pos).

    Args:
        slopes: None computes the paper's slopes from the number of heads; an array [num_q_heads] of
            float32 gives them; "input" leaves them to be given at each run as `slopes=...`. No call
            takes any where they are the paper's.
    """

    slopes = Tensor("float32", ("q_head",))

    def __init__(self, slopes: Any = None) -> None:
        if slopes is None:
            self.left_out = ("slopes",)
        elif isinstance(slopes, str):
            if slopes != "input":
                reason = f"is {slopes!r}; expected None, an array or 'input'"
                raise ArgumentError(name="slopes", reason=reason)
        else:
            self.slopes = slopes

    def logits_transform(self, logits: Value, at: Position) -> Value:
        if "slopes" in self.left_out:
            slope = alibi_slope(at.q_head, at.num_q_heads)
        else:
            slope = self.slopes[at.q_head]
        return logits + slope * (at.kv_pos - at.q_pos)


def alibi_slope(head: Value, num_heads: Value) -> Value:
    """The slope of a head: a geometric series over p heads, p the largest power of two in
    `num_heads`.

    Heads beyond p take every other slope of the series for 2p heads.
    """
    # half a head more: log2 then never lies on a whole number, where rounding would decide
    p = exp2(floor(log2(num_heads + 0.5)), precise=True)
    first = to_float(head) < p
    exponent = where(first, -8.0 * (head + 1), -4.0 * (2 * (head - p) + 1)) / p
    return exp2(exponent, precise=True)
