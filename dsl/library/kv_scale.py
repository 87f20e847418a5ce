"""Scales of quantised keys and values: per tensor, per head, or per token and head.

A kernel reads 8-bit keys and values as the numbers that they stand for. What these must be
multiplied with goes where it costs least: that of keys onto the logits, and that of values onto the
output, or, one per token, onto the weights of the softmax.
"""

from __future__ import annotations

from typing import Any, ClassVar

from warploom.dsl.library.numbers import positive
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.variant import Variant


class _ReadScaled(Variant):
    """Variants that multiply what is read, but behind transforms of vectors of other links."""

    scaled_behind: ClassVar[tuple[str, ...]] = ("key_transform", "value_transform")
    scaled_first: ClassVar[tuple[str, ...]] = ("logits_transform", "output_transform")

    @property
    def obstacle_to_appending(self) -> str | None:
        """Scales would be left out, or multiply; who adds a transform knows what it does."""
        if type(self).key_transform is not Variant.key_transform:
            return None
        return (
            f"{self.name} multiplies what is read, and an append has to divide: give a variant "
            "whose key_transform and value_transform divide by the scales"
        )


class KVScale(_ReadScaled):
    """Keys are `k_scale` and values `v_scale` times what is stored.

    Put it first, so that other transforms see scaled logits: `KVScale(...) & SoftCap(50.0)`. Behind
    one that is no multiple of its logits it is refused (`ScaleBehind`), finite numbers that stand
    for -inf among them; one that records logits there records them without the scale.
    Transforms of keys and values see what is stored, so that only those go with it that are as many
    times as large for a vector so many times as large: rotations, but no norms.

    Args:
        k: scale of all keys; None leaves it to be given at run time as `k_scale=...`.
        v: scale of all values, likewise.

    Raises:
        ArgumentError: a scale that is not above 0 and finite, wherever it is given.
    """

    k_scale = Scalar("float32", check=positive)
    v_scale = Scalar("float32", check=positive)

    def __init__(self, k: float | None = None, v: float | None = None) -> None:
        if k is not None:
            self.k_scale = k
        if v is not None:
            self.v_scale = v

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits * self.k_scale

    def output_transform(self, o: Value, at: Position) -> Value:
        return o * self.v_scale


class HeadKVScale(_ReadScaled):
    """The same with a scale for each key/value head.

    Args:
        k: [num_kv_heads] float32; None leaves it to be given at run time as `k_scale=...`.
        v: [num_kv_heads] float32, likewise.
    """

    k_scale = Tensor("float32", ("kv_head",))
    v_scale = Tensor("float32", ("kv_head",))

    def __init__(self, k: Any = None, v: Any = None) -> None:
        if k is not None:
            self.k_scale = k
        if v is not None:
            self.v_scale = v

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits * self.k_scale[at.kv_head]

    def output_transform(self, o: Value, at: Position) -> Value:
        return o * self.v_scale[at.kv_head]


class TokenKVScale(_ReadScaled):
    """The same with a scale for each token and key/value head.

    Kernels that stage keys multiply weights with the scales of values, and count both in the
    softmax, so that the product is rounded as a weight is. (Not where float16 meets 16-bit values,
    or where largest scores are told: there values are multiplied.)

    Args:
        k: [batch, keys, num_kv_heads] float32, by position in the sequence and not by page; None
            leaves it to be given at run time as `k_scale=...`.
        v: [batch, keys, num_kv_heads] float32, likewise.
    """

    scaled_behind = ("key_transform",)
    scaled_first = ("logits_transform", "value_transform")
    k_scale = Tensor("float32", ("batch", "kv_pos", "kv_head"))
    v_scale = Tensor("float32", ("batch", "kv_pos", "kv_head"))

    def __init__(self, k: Any = None, v: Any = None) -> None:
        if k is not None:
            self.k_scale = k
        if v is not None:
            self.v_scale = v

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits * self.k_scale[at.batch, at.kv_pos, at.kv_head]

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * self.v_scale[at.batch, at.kv_pos, at.kv_head]
