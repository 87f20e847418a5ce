"""A variant as one rank must run it: its functors get positions of the whole sequence.

A kernel counts the keys and query rows that it is given. `Placed` wraps any variant and hands its
functors an `at` whose numbers are those of the whole sequence, worked out from the rank's own, so
that masks, rotary angles and biases stay what the user wrote, and kernels know nothing of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from warploom.dsl.types.limits import MAX_LENGTH
from warploom.dsl.values.functions import clamp
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import READING, Field, Reading, Tensor
from warploom.dsl.variants.outputs import Output
from warploom.dsl.variants.variant import Variant, as_variant
from warploom.errors import ArgumentError, UnsupportedSpec
from warploom.serving.distributed.layouts import Layout

FIELD = "placement"
_KV_LEN, _Q_LEN, _Q_ROW = range(3)
NUM_COMMON = 3


class Whole(Variant):
    """A variant whose functors see positions of whole sequences; the base of what ranks run.

    Args:
        inner: the user's variant.
        queries: where the given query rows lie in their sequence; None: all are given.
        keys: where the given keys lie; None: all are given.

    Raises:
        UnsupportedSpec: a variant that records, whose places would be those of a rank.
        ArgumentError: a field of the variant is called "placement".
        VariantError: the variant cannot be traced.
    """

    placement = Tensor("int32", ("batch", None))

    def __init__(
        self, inner: Variant | type[Variant] | None, queries: Layout | None, keys: Layout | None
    ) -> None:
        self.inner = as_variant(inner)
        self.queries, self.keys = queries, keys
        self.softmax = self.inner.softmax
        self.expected: tuple[Any, Any] | None = None
        known = self.inner.fields()
        if FIELD in known:
            reason = f"{self.inner.name} has a field of this name, which ranks use; rename it"
            raise ArgumentError(name=FIELD, reason=reason)
        for name, field in known.items():
            if isinstance(field, Output):
                raise UnsupportedSpec(
                    what=f"recording in {name!r} on several ranks",
                    reason="each rank sees a part of the keys",
                    remedy="Leave the recording variant out, or run it in one process.",
                )

    @property
    def num_columns(self) -> int:
        """Numbers that the kernel reads for each request."""
        return NUM_COMMON + sum(part.num_columns for part in (self.queries, self.keys) if part)

    @property
    def name(self) -> str:
        return f"{self.inner.name}_{type(self).__name__.lower()}"

    def fields(self) -> dict[str, Field]:
        inner = self.__dict__.get("inner")  # __setattr__ asks before it is there
        return {} if inner is None else {**inner.fields(), **super().fields()}

    def inputs(self) -> dict[str, Any]:
        return {**self.inner.inputs(), **super().inputs()}

    def functors(self) -> list[tuple[str, Any]]:
        return self.inner.functors()

    def decides_softmax(self) -> bool:
        return True

    def under(self, reading: Reading) -> Whole:
        made = copy.copy(self)
        made.__dict__["inner"] = self.inner.under(reading)
        made.__dict__[READING] = reading
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, queries={self.queries}, keys={self.keys})"

    def whole(self, at: Position) -> Position:
        """`at` with the numbers of the whole sequence."""
        return _WholePosition(at, self)

    def column(self, at: Position, index: int) -> Value:
        return self.placement[at.batch, index]

    # --- positions of the whole sequence, by their names in `at`

    def kv_len(self, at: Position) -> Value:
        return clamp(self.column(at, _KV_LEN), 0, MAX_LENGTH)

    def q_len(self, at: Position) -> Value:
        if self.queries is None:
            return at.q_len
        return clamp(self.column(at, _Q_LEN), 0, MAX_LENGTH)

    def q_idx(self, at: Position) -> Value:
        if self.queries is None:
            return at.q_idx
        return self.queries.position(at.q_idx, lambda i: self.column(at, NUM_COMMON + i))

    def q_pos(self, at: Position) -> Value:
        return self.q_idx(at) + (self.kv_len(at) - self.q_len(at))

    def q_row(self, at: Position) -> Value:
        if self.queries is None:
            return at.q_row
        return clamp(self.column(at, _Q_ROW), 0, MAX_LENGTH) + self.q_idx(at)

    def kv_pos(self, at: Position) -> Value:
        if self.keys is None:
            return at.kv_pos
        first = NUM_COMMON + (self.queries.num_columns if self.queries else 0)
        return self.keys.position(at.kv_pos, lambda i: self.column(at, first + i))


_MOVED = ("kv_len", "q_len", "q_idx", "q_pos", "q_row", "kv_pos")


class _WholePosition(Position):
    """A position whose numbers are worked out when a functor reads them."""

    def __init__(self, at: Position, variant: Whole) -> None:
        self.__dict__["_at"], self.__dict__["_variant"] = at, variant

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._at, name)  # refuses what this hook may not read
        return getattr(self._variant, name)(self._at) if name in _MOVED else found

    def described(self) -> str:
        at: Position = self._at
        return at.described()

    def remedy(self) -> str:
        at: Position = self._at
        return at.remedy()


class Placed(Whole):
    """What a rank computes of its keys: everything but the output transform.

    That one comes once, after the states of all ranks have been merged; see `Epilogue`. So an
    attention sink counts once.
    """

    def query_transform(self, q: Value, at: Position) -> Value:
        return self.inner.query_transform(q, self.whole(at))

    def key_transform(self, k: Value, at: Position) -> Value:
        return self.inner.key_transform(k, self.whole(at))

    def value_transform(self, v: Value, at: Position) -> Value:
        return self.inner.value_transform(v, self.whole(at))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return self.inner.logits_transform(logits, self.whole(at))

    def logits_mask(self, at: Position) -> Value:
        return self.inner.logits_mask(self.whole(at))

    @property
    def checks_lengths(self) -> bool:
        return self.expected is not None

    def check_lengths(self, known: Mapping[str, Any], q_lens: Any, kv_lens: Any) -> None:
        """Refuse a batch that is not this rank's part of the whole one, then ask the variant."""
        if self.expected is None:
            return
        (q_own, q_whole), (kv_own, kv_whole) = self.expected
        for name, got, own in (("query rows", q_lens, q_own), ("keys", kv_lens, kv_own)):
            if not np.array_equal(got, own):
                reason = f"this rank has {own.tolist()} {name} of the requests by {self.keys}, "
                reason += f"and is planned with {np.asarray(got).tolist()}"
                raise ArgumentError(name="total_kv_lens", reason=reason)
        self.inner.check_lengths(known, q_whole, kv_whole)


class Epilogue(Whole):
    """The output transform of a variant, of merged states.

    The kernel of attention applies it, over one key for each row and query head: its logit is the
    state's log-sum-exp, its value the state's output, so that attention gives both back as they
    were. The heads of a group are keys g of a row: key q_idx * group_size + g.
    """

    merged_lse = Tensor("float32", ("q_row", "q_head"))

    def __init__(
        self, inner: Variant | type[Variant] | None, queries: Layout | None, is_batched: bool
    ) -> None:
        super().__init__(inner, queries, None)
        self._is_batched = is_batched  # dense tensors count rows within a request

    def q_row(self, at: Position) -> Value:
        return self.q_idx(at) if self._is_batched else super().q_row(at)

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return self.merged_lse[at.q_row, at.q_head] if self.softmax else 1.0

    def logits_mask(self, at: Position) -> Value:
        group_size = at.num_q_heads // at.num_kv_heads
        own = at.q_idx * group_size + at.q_head - at.kv_head * group_size
        return at.kv_pos == own

    def output_transform(self, o: Value, at: Position) -> Value:
        return self.inner.output_transform(o, self.whole(at))
