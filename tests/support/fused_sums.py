"""Variants whose last bits tell how a compiler fuses products and sums, and how it masks."""

from __future__ import annotations

import warploom as wl
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value


class Wave(wl.Variant):
    """Logits of two products, of which compilers may fuse either with the sum."""

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + wl.sin(0.1 * (at.q_pos - at.kv_pos))


VARIANTS = (wl.Alibi(), Wave(), wl.SoftCap(20.0), wl.SlidingWindow(40))
