"""A prompt that sees all of itself, and a causal continuation."""

from __future__ import annotations

from typing import Any

from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Tensor
from warploom.dsl.variants.variant import Variant


class PrefixLM(Variant):
    """Visible if the key is in its request's prefix, or not after the query.

    Args:
        prefix_len: [batch] int32, tokens of each prefix; None leaves it to be given at run time.
    """

    prefix_len = Tensor("int32", ("batch",))

    def __init__(self, prefix_len: Any = None) -> None:
        if prefix_len is not None:
            self.prefix_len = prefix_len

    def logits_mask(self, at: Position) -> Value:
        return (at.kv_pos < self.prefix_len[at.batch]) | (at.kv_pos <= at.q_pos)
