"""A query sees the keys up to its own position."""

from __future__ import annotations

from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.variant import Variant


class Causal(Variant):
    """Visible if kv_pos <= q_pos; queries are aligned to the end of the keys (bottom-right)."""

    def logits_mask(self, at: Position) -> Value:
        return at.kv_pos <= at.q_pos
