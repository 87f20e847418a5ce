"""A query sees a band of keys around its own position."""

from __future__ import annotations

from typing import Final

from warploom.dsl.values.functions import clamp, maximum, minimum, where
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar
from warploom.dsl.variants.variant import Variant

_FAR: Final = 2**30  # keys: more than any request has, and no sum with a position overflows


def _check_side(keys: int) -> str | None:
    return f"is {keys}; expected a number of keys, or -1 for no limit" if keys < -1 else None


def _check_sinks(keys: int) -> str | None:
    return f"is {keys}; expected a number of keys" if keys < 0 else None


class SlidingWindow(Variant):
    """Visible if q_pos - left <= kv_pos <= q_pos + right; `left` hides no attention-sink token.

    Both ends are inclusive: `left=4096` sees 4096 keys before the query's own, as in FlashInfer. It
    does not imply causality; chain it with `Causal()`, or give `right=0`. A side of -1 is
    off, at run time too: one kernel serves layers with and without a window.

    Args:
        left: keys before the query; -1 is no limit.
        right: keys after the query; -1 is no limit.
        sinks: keys at the beginning that `left` never hides (StreamingLLM). A window made with a
            number, 0 too, takes others at run time; None is a window without, for which kernels
            have no code and no call takes any.

    Raises:
        ArgumentError: a side below -1, or a negative number of sinks, wherever it is given.
    """

    left = Scalar("int32", check=_check_side)
    right = Scalar("int32", default=-1, check=_check_side)
    sinks = Scalar("int32", default=0, check=_check_sinks)

    def __init__(self, left: int, right: int = -1, sinks: int | None = None) -> None:
        super().__init__(left=left, right=right)
        if sinks is None:
            self.left_out = ("sinks",)
        else:
            self.sinks = sinks

    def logits_mask(self, at: Position) -> Value:
        # The ends of both ranges depend on the row alone: a kernel works them out once for all
        # keys, and keeps nothing of a key. A huge window must not overflow; a query may lie before
        # position 0, a key may not.
        behind = maximum(where(self.left < 0, _FAR, self.left), 0)
        ahead = clamp(where(self.right < 0, _FAR, self.right), 0, _FAR)
        first = maximum(at.q_pos, 0) - behind
        last = at.q_pos + ahead
        is_seen = at.kv_pos >= first
        if "sinks" not in self.left_out:
            is_seen = is_seen | (at.kv_pos < minimum(self.sinks, first))
        return is_seen & (at.kv_pos <= last)
