"""FlashInfer's arguments that shape scores, as a variant and the values of its fields."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from numbers import Real
from typing import Any

from warploom.dsl.library.alibi import alibi_slope
from warploom.dsl.library.attention_sink import AttentionSink
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.kv_scale import KVScale
from warploom.dsl.library.packed_mask import PackedMask
from warploom.dsl.library.rope import Rope
from warploom.dsl.library.rope_scaling import LinearScaling
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.values.functions import where
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar
from warploom.dsl.variants.variant import Variant
from warploom.engines.flashinfer.refusals import checked_encoding
from warploom.engines.layers import chained
from warploom.errors import ArgumentError


class AlibiFromFirstRow(Variant):
    """ALiBi as FlashInfer counts: distances from the row's number among the request's new rows.

    Outputs are those of `Alibi`, whose distances differ by one number in each row; log-sum-exps and
    what a soft-cap makes of the logits are not.
    """

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + alibi_slope(at.q_head, at.num_q_heads) * (at.kv_pos - at.q_idx)


class DecodeScale(KVScale):
    """`KVScale` of the requests from one on alone: of a batch of prefills and decodes, the latter.

    Values come at run time: `k_scale` and `v_scale`, and `first_decode`, a number of requests.
    """

    first_decode = Scalar("int32")

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits * where(at.batch >= self.first_decode, self.k_scale, 1.0)

    def output_transform(self, o: Value, at: Position) -> Value:
        return o * where(at.batch >= self.first_decode, self.v_scale, 1.0)


@dataclass(frozen=True)
class Scores:
    """Which functors a kernel has; their numbers are values of `Shaping`, and make no new kernel.

    Attributes:
        encoding: FlashInfer's name.
        is_causal, has_window: what is hidden; a window hides keys before it alone.
        is_masked: bits say what is hidden, in place of causality.
        has_cap: logits are pressed into a band.
        has_scales: of q.k and of values.
        scales_decodes: they are those of `DecodeScale`.
        has_sinks: a logit for each head without a value.
    """

    encoding: str = "NONE"
    is_causal: bool = False
    has_window: bool = False
    is_masked: bool = False
    has_cap: bool = False
    has_scales: bool = False
    has_sinks: bool = False
    scales_decodes: bool = False

    @property
    def variant(self) -> Variant:
        """One object for equal scores."""
        return _variant(self)


@dataclass(frozen=True)
class Shaping:
    """FlashInfer's arguments, the same in all of its calls; values that mean the same are equal.

    Attributes:
        causal: queries see no key after them; without effect beside a mask of bits.
        window_left: keys before a query that it sees; negative for all.
        logits_soft_cap: the bound of logits; None, 0 or less for none.
        pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI".
        rope_scale, rope_theta: 1 and 1e4 by default.
        is_masked: there are bits.

    Raises:
        ArgumentError: another encoding, a window that is no int, or a cap that is no number.
    """

    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None
    is_masked: bool = False

    def __post_init__(self) -> None:
        checked_encoding(self.pos_encoding_mode)
        if isinstance(self.window_left, bool) or not hasattr(self.window_left, "__index__"):
            reason = f"is {self.window_left!r}; expected an int, -1 for no window"
            raise ArgumentError(name="window_left", reason=reason)
        cap = self.logits_soft_cap
        if cap is not None and not (isinstance(cap, Real) and isfinite(cap)):
            reason = f"is {cap!r}; expected a finite number, None or 0 for no cap"
            raise ArgumentError(name="logits_soft_cap", reason=reason)
        rotates = self.pos_encoding_mode == "ROPE_LLAMA"
        alike = {
            "causal": bool(self.causal),
            "window_left": max(-1, int(self.window_left)),
            "logits_soft_cap": float(cap) if cap is not None and cap > 0 else None,
            "rope_scale": _or(1.0, self.rope_scale) if rotates else None,
            "rope_theta": _or(1e4, self.rope_theta) if rotates else None,
        }
        for name, value in alike.items():
            object.__setattr__(self, name, value)

    @property
    def scores(self) -> Scores:
        return Scores(
            encoding=self.pos_encoding_mode,
            is_causal=self.causal and not self.is_masked,
            has_window=self.window_left >= 0,
            is_masked=self.is_masked,
            has_cap=self.logits_soft_cap is not None,
        )

    @property
    def values(self) -> dict[str, Any]:
        """Numbers of the fields that the variant has."""
        found: dict[str, Any] = {}
        if self.pos_encoding_mode == "ROPE_LLAMA":
            found["rope_theta"], found["rope_factor"] = self.rope_theta, self.rope_scale
        if self.window_left >= 0:
            found["left"] = self.window_left
        if self.logits_soft_cap is not None:
            found["cap"] = self.logits_soft_cap
        return found


def _or(default: float, given: float | None) -> float:
    return default if given is None else given


@lru_cache(maxsize=256)
def _variant(scores: Scores) -> Variant:
    parts: list[Variant] = []
    if scores.encoding == "ROPE_LLAMA":
        parts.append(Rope(scaling=LinearScaling(1.0)))
    if scores.has_scales:
        parts.append(DecodeScale() if scores.scales_decodes else KVScale())
    if scores.encoding == "ALIBI":
        parts.append(AlibiFromFirstRow())
    if scores.has_cap:
        parts.append(SoftCap(1.0))
    if scores.is_masked:
        parts.append(PackedMask())
    if scores.is_causal:
        parts.append(Causal())
    if scores.has_window:
        parts.append(SlidingWindow(0))
    if scores.has_sinks:
        parts.append(AttentionSink())
    return chained(parts or [Variant()])
