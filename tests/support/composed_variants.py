"""Variants for tests of the composed format on every back end."""

from __future__ import annotations

import warploom as wl
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value


class EveryHook(wl.Variant):
    """Each hook does something, and rows read what only their request has."""

    per_row = wl.Tensor("float32", ("batch",))
    per_key = wl.Tensor("float32", ("batch", "kv_pos"))
    hidden = wl.Tensor("bool", ("kv_head", "kv_pos"))

    def query_transform(self, q: Value, at: Position) -> Value:
        return q * (self.per_row[at.batch] + wl.to_float(at.lane) / 64.0)

    def key_transform(self, k: Value, at: Position) -> Value:
        return wl.where(at.kv_pos % 3 == 0, -k, k)

    def value_transform(self, v: Value, at: Position) -> Value:
        return v + wl.mean(v) * wl.to_float(at.kv_pos % 5)

    def logits_transform(self, logits: Value, at: Position) -> Value:
        ahead = wl.to_float(at.q_pos - at.kv_pos) / wl.to_float(at.kv_len)
        return logits + self.per_key[at.batch, at.kv_pos] * ahead

    def logits_mask(self, at: Position) -> Value:
        return (at.kv_pos <= at.q_pos + at.batch % 2) & ~self.hidden[at.kv_head, at.kv_pos]

    def output_transform(self, o: Value, at: Position) -> Value:
        return o * wl.sigmoid(at.lse) + self.per_row[at.batch]


class NormOfRequest(wl.Variant):
    """The output transform reduces over lanes what it loads for the row's request."""

    weight = wl.Tensor("float32", ("batch",))

    def output_transform(self, o: Value, at: Position) -> Value:
        weight = self.weight[at.batch]
        return o * wl.rsqrt(wl.sum(o * o * weight * weight) + 1.0)
