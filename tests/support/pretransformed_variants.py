"""Key transforms that a kernel before attention must get right, beside the shipped ones."""

from __future__ import annotations

import warploom as wl
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value


class OwnKeys(wl.Variant):
    """Reads the request, the head, the position and lengths, and reduces."""

    gain = wl.Scalar("float32", default=0.5)
    per_key = wl.Tensor("float32", ("batch", "kv_pos"))
    per_head = wl.Tensor("float32", ("kv_head",))

    def key_transform(self, k: Value, at: Position) -> Value:
        size = wl.rsqrt(wl.mean(k * k) + 0.1) + self.per_key[at.batch, at.kv_pos]
        shift = wl.to_float(at.kv_pos - at.kv_len + at.q_len) / 64.0 + self.gain
        return k * size + self.per_head[at.kv_head] * shift

    def logits_mask(self, at: Position) -> Value:
        return at.kv_pos <= at.q_pos


class OfHeads(wl.Variant):
    """Differs between heads, and keeps of a lane what differs between requests."""

    gain = wl.Tensor("float32", ("batch", "kv_head"))

    def key_transform(self, k: Value, at: Position) -> Value:
        return k * wl.exp2(self.gain[at.batch, at.kv_head] * wl.to_float(at.lane) / 400.0)
