"""RoPE of queries alone, for caches whose keys are rotated when they are appended."""

from __future__ import annotations

import warploom as wl
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value


class QueryRope(wl.Rope):
    def key_transform(self, k: Value, at: Position) -> Value:
        return k
