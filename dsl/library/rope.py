"""Rotary position embedding of queries and keys as they are read (RoFormer, Su et al. 2021)."""

from __future__ import annotations

from typing import Any, Literal

from warploom.dsl.graphs.lanes import checked_dim
from warploom.dsl.library.numbers import positive
from warploom.dsl.library.rope_scaling import RopeScaling
from warploom.dsl.values.functions import cos, exp2, log2, rotate_half, rotate_pairs, sin, where
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError


class Rope(Variant):
    """Rotates query and key vectors by their positions; keys are cached unrotated.

    Args:
        theta: base of the frequencies.
        interleaved: False pairs lane i with lane i + dim/2 (Llama in Hugging Face); True pairs
            lanes 2i and 2i + 1 (GPT-J, Meta's Llama).
        positions: "cache" rotates by the index in the cache, which is the position in the sequence
            as long as nothing was evicted, and what StreamingLLM needs afterwards. "sequence" reads
            real positions from the input `rope_positions` [batch, kv_pos]; queries are the last
            tokens there.
        scaling: `LinearScaling`, `Llama3Scaling` or `YarnScaling`.
        dim: rotate only the first `dim` lanes, an even int; all by default. More than the heads
            have is refused where attention is declared.

    Raises:
        FieldMisuse: a theta that is no number.
        ArgumentError: one, or a number of the scaling, that is not above 0 or not finite, wherever
            it is given; or no such positions, scaling or dim.
    """

    rope_theta = Scalar("float32", check=positive)
    rope_positions = Tensor("int32", ("batch", "kv_pos"))
    # numbers of the scaling rule; read only if there is one
    rope_factor = Scalar("float32", default=1.0, check=positive)
    rope_low = Scalar("float32", default=1.0, check=positive)
    rope_high = Scalar("float32", default=1.0, check=positive)
    rope_original_length = Scalar("float32", default=1.0, check=positive)
    rope_magnitude = Scalar("float32", default=1.0, check=positive)

    def __init__(
        self,
        theta: float = 10000.0,
        *,
        interleaved: bool = False,
        positions: Literal["cache", "sequence"] = "cache",
        scaling: RopeScaling | None = None,
        dim: int | None = None,
    ) -> None:
        if positions not in ("cache", "sequence"):
            reason = f"{positions!r} is neither 'cache' nor 'sequence'"
            raise ArgumentError(name="positions", reason=reason)
        _check_scaling(scaling)
        self._interleaved = interleaved
        self._real_positions = positions == "sequence"
        self._scaling = scaling
        self._dim = None if dim is None else checked_dim(dim)
        super().__init__(rope_theta=theta, **(scaling.values() if scaling else {}))

    def query_transform(self, q: Value, at: Position) -> Value:
        return self._rotate(q, self._position(at.q_pos, at), at)

    def key_transform(self, k: Value, at: Position) -> Value:
        return self._rotate(k, self._position(at.kv_pos, at), at)

    def _position(self, index: Value, at: Position) -> Value:
        return self.rope_positions[at.batch, index] if self._real_positions else index

    def _rotate(self, x: Value, position: Value, at: Position) -> Value:
        width = at.head_dim if self._dim is None else self._dim
        pair = at.lane // 2 if self._interleaved else at.lane % (width // 2)
        frequency = exp2(pair * (-2.0 / width) * log2(self.rope_theta, precise=True), precise=True)
        if self._scaling is not None:
            frequency = self._scaling.frequency(frequency, pair, width, self)
        angle = position * frequency
        partner = (rotate_pairs if self._interleaved else rotate_half)(x, self._dim)
        rotated = x * cos(angle) + partner * sin(angle)
        if self._scaling is not None and "rope_magnitude" in self._scaling.values():
            rotated = rotated * self.rope_magnitude
        return rotated if self._dim is None else where(at.lane < self._dim, rotated, x)


def _check_scaling(scaling: Any) -> None:
    """Raises ArgumentError for what is no rule: a name, a class, a configuration's dict."""
    rule = all(callable(getattr(scaling, name, None)) for name in ("values", "frequency"))
    if scaling is None or (rule and not isinstance(scaling, type)):
        return
    given = f"the class {scaling.__name__}" if isinstance(scaling, type) else repr(scaling)
    reason = (
        f"is {given}; expected None, LinearScaling(factor), Llama3Scaling(...) or YarnScaling(...)"
    )
    raise ArgumentError(name="scaling", reason=reason)
