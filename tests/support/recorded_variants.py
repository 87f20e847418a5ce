"""Variants that record values at different points of their chains; for every back end."""

from __future__ import annotations

import warploom as wl
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value


class Dump(wl.Variant):
    """Logits as they are at this point of the chain."""

    seen = wl.Output("float32", ("batch", "q_head", "q_idx", "kv_pos"))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return self.seen.record(logits, at)


class Rows(wl.Variant):
    """The same, with a place for each row of all requests."""

    rows = wl.Output("float16", ("q_row", "kv_pos", "q_head"))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return self.rows.record(logits, at)


class Terms(wl.Variant):
    """Two values of one functor; one of them is no part of the result, and reads a tensor."""

    before = wl.Output("float32", ("kv_pos", "batch", "q_head", "q_pos"))
    bias = wl.Output("bfloat16", ("batch", "q_head", "q_idx", "kv_pos"))
    weight = wl.Tensor("float32", ("q_head", "kv_pos"))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        bias = self.weight[at.q_head, at.kv_pos] * wl.to_float(at.q_pos % 7)
        self.bias.record(bias, at)
        return wl.tanh(self.before.record(logits, at) / 3.0) * 3.0 + at.kv_len


class SomeKeys(wl.Variant):
    """A mask of which tiles below the diagonal leave the tensor's part open."""

    hidden = wl.Tensor("bool", ("kv_head", "kv_pos"))

    def logits_mask(self, at: Position) -> Value:
        return ~self.hidden[at.kv_head, at.kv_pos] & (at.kv_pos <= at.q_pos)


class Weighed(wl.Variant):
    """No softmax, and no transform but what is recorded: nothing else would scale the products."""

    softmax = False
    seen = wl.Output("float32", ("batch", "q_idx", "q_head", "kv_pos"))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return self.seen.record(logits, at)


VARIANTS = {
    "alone": Dump(),
    "before a cap": wl.Causal() & Dump() & wl.SoftCap(3.0),
    "behind a cap": wl.SlidingWindow(20) & wl.SoftCap(3.0) & Dump(),
    "before a bias": wl.Causal() & Dump() & wl.Alibi(),
    "behind a bias": wl.Alibi() & Dump() & wl.Causal(),
    "two terms": wl.Causal() & Terms(),
    "two parts": Dump() & wl.SoftCap(2.0) & Terms() & wl.SlidingWindow(50),
    "open part": SomeKeys() & Dump(),
    "documents": wl.DocumentMask() & wl.Alibi() & Dump(),
    "no softmax": wl.Causal() & Weighed(),
    "sigmoid": Dump() & wl.FlashSigmoid(bias=-2.0),
    "transformed": wl.Rope() & wl.Causal() & Dump(),
}
ROWS = wl.Causal() & Rows() & wl.SoftCap(3.0)  # not of dense tensors
