"""A query sees a band of keys around its own position."""

from __future__ import annotations

from warploom.dsl.fields import Scalar
from warploom.dsl.position import Position
from warploom.dsl.symbols import Value
from warploom.dsl.variant import Variant


class SlidingWindow(Variant):
    """Visible if q_pos - left <= kv_pos <= q_pos + right, or if the key is an attention-sink token.

    Both ends are inclusive: `left=4096` sees 4096 keys before the query's own, as in FlashInfer. It
    does not imply causality; compose it with `Causal()`, or give `right=0`. A side of -1 (any
    negative number) is off, at run time too: one kernel serves layers with and without a window.

    Args:
        left: keys before the query; -1 is no limit.
        right: keys after the query; -1 is no limit.
        sink_tokens: keys at the beginning that `left` never hides (StreamingLLM).
    """

    left = Scalar("int32")
    right = Scalar("int32", default=-1)
    sink_tokens = Scalar("int32", default=0)

    def __init__(self, left: int, right: int = -1, sink_tokens: int = 0) -> None:
        self.left = left
        self.right = right
        self.sink_tokens = sink_tokens

    def logits_mask(self, at: Position) -> Value:
        # differences of positions: position + window would overflow for a huge window
        from_left = (self.left < 0) | (at.q_pos - at.kv_pos <= self.left)
        from_right = (self.right < 0) | (at.kv_pos - at.q_pos <= self.right)
        return (from_left | (at.kv_pos < self.sink_tokens)) & from_right
