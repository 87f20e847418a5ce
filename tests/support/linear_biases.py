"""Biases that grow from key to key, gentle and steep, and of sizes where things go wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

import warploom as wl
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.runtime.trials.case import Case


class Decay(wl.Variant):
    """The README's."""

    rate = wl.Scalar("float32", default=0.1)

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits - self.rate * (at.q_pos - at.kv_pos)

    def logits_mask(self, at: Position) -> Value:
        return at.kv_pos <= at.q_pos


class Before(wl.Alibi):
    """Rows do not see their own key, and the first row nothing, whatever the slopes are."""

    def __init__(self) -> None:
        super().__init__("input")

    def logits_mask(self, at: Position) -> Value:
        return at.kv_pos < at.q_pos


class FarOrigin(wl.Variant):
    """All biases of a row are large."""

    origin = wl.Scalar("int32", default=1_000_003)

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + (at.kv_pos - wl.maximum(self.origin, 0)) / 3.0


VARIANTS: dict[str, wl.Variant] = {
    "alibi": wl.Causal() & wl.Alibi(),
    "both ways": wl.Alibi(),
    "decay": Decay(),
    "steep": Decay(rate=30.0),
    "backwards": Decay(rate=-0.5),
    "after a cap": wl.Causal() & wl.SoftCap(5.0) & wl.Alibi(),
    "window": wl.SlidingWindow(20) & wl.Alibi(),
    "documents": wl.Causal() & wl.DocumentMask() & wl.Alibi("input"),
    "any slopes": Before(),
    "far origin": FarOrigin(),
}


def slopes(case: Case, _: np.random.Generator) -> dict[str, Any]:
    """Slopes of all sizes; an infinite one hides all keys before the row's own."""
    sizes = (np.inf, 1e4, -1e4, 3.0, -1e-3, 40.0, 0.0, 1e-30)
    return {"slopes": np.resize(np.array(sizes, np.float32), case.num_q_heads)}


INPUTS = {"any slopes": slopes}
