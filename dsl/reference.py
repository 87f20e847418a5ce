"""The oracle: plain attention on NumPy float64 that calls the user's functors, request by request.

It never touches the IR. `naive_attention` is the same computation as a careless low-precision
program would do it; its error against the oracle says how much error a kernel may have (see
`tolerance`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from warploom.dsl.types.rounding import assert_close as assert_close
from warploom.dsl.types.rounding import rounder
from warploom.dsl.types.rounding import tolerance as tolerance
from warploom.dsl.values.arrays import Array, Array32, to_numpy
from warploom.dsl.values.position import Position
from warploom.dsl.variants import check
from warploom.dsl.variants.readings import NumpyReading
from warploom.dsl.variants.variant import Variant, as_variant
from warploom.errors import ArgumentError, UnknownInput, WrongShape

Floats: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Precision:
    """How a computation rounds: class of intermediate values, and storage rounding of operands."""

    array_class: type[Array]
    store: Callable[[Floats], Floats]


_EXACT = Precision(Array, lambda x: x)


def reference_attention(
    variant: Variant | type[Variant] | None,
    q: Any,
    k: Any,
    v: Any,
    *,
    batch: int = 0,
    sm_scale: float | None = None,
    inputs: Mapping[str, Any] | None = None,
    kv_positions: Any = None,
    first_q_idx: int = 0,
    first_q_row: int = 0,
    q_len: int | None = None,
    kv_len: int | None = None,
    precision: Precision = _EXACT,
    max_scores: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Attention of one request, element by element as the variant says it.

    Args:
        variant: its functors are called on NumPy arrays; None is plain attention.
        q: [rows, num_q_heads, head_dim_qk], NumPy or torch.
        k: [keys, num_kv_heads, head_dim_qk].
        v: [keys, num_kv_heads, head_dim_v].
        batch: the request's index.
        sm_scale: factor of q.k; 1/sqrt(head_dim_qk) by default.
        inputs: run-time values of fields; they override those bound at construction. What
            functors record is written to tensors and arrays of outputs.
        kv_positions: [keys] kv_pos of each given key, if they are not 0, 1, 2, ...; keys at or
            after `kv_len` are invisible.
        first_q_idx: index of the first given row within the request.
        first_q_row: index of the first given row over all requests.
        q_len: query rows of the whole request; first_q_idx + rows by default.
        kv_len: keys of the whole request; the number of keys given by default.
        precision: float64 by default.
        max_scores: [rows, num_q_heads] to fill with each row's largest score: the largest logit
            that it sees, after `logits_transform`; -inf if it sees nothing, 0 without softmax, NaN
            if a logit is.

    Returns:
        Output [rows, num_q_heads, head_dim_v] and natural log-sum-exp [rows, num_q_heads], float64.
        A row that sees nothing has output 0 and log-sum-exp -inf, one that sees a logit of inf
        NaN and inf, and one that sees NaN has NaN for both. Without softmax, log-sum-exp is 0.

    Raises:
        MissingInput: a field that is read has no value.
        UnknownInput: `inputs` names no field.
        WrongResult: a functor returned bools for numbers, or numbers for bools.
        WrongShape: not three dimensions, or ones that disagree; or a tensor of a field that is
            shorter than what indexes it.
        FieldMisuse: a number that its field does not hold.
        ArgumentError: `inputs` that are no mapping.
    """
    variant = as_variant(variant)
    q, k, v = (precision.store(to_numpy(x)) for x in (q, k, v))
    _check_shapes(q, k, v)
    rows, num_q_heads, head_dim = q.shape
    keys, num_kv_heads, _ = v.shape
    q_idx = first_q_idx + np.arange(rows)
    q_len = first_q_idx + rows if q_len is None else q_len
    kv_len = keys if kv_len is None else kv_len
    kv_pos = np.arange(keys) if kv_positions is None else to_numpy(kv_positions)
    sizes = {"batch": batch + 1, "q_head": num_q_heads, "kv_head": num_kv_heads, "q_pos": kv_len}
    sizes |= {"kv_pos": kv_len, "q_row": first_q_row + rows, "q_idx": first_q_idx + rows}
    reading = NumpyReading(variant.name, _values(variant, inputs), precision.array_class, sizes)
    request = _Request(
        variant=variant.under(reading),
        reading=reading,
        precision=precision,
        sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale,
        positions={
            "batch": np.full((1, 1), batch),
            "q_len": np.full((1, 1), q_len),
            "kv_len": np.full((1, 1), kv_len),
            "num_q_heads": np.full((1, 1), num_q_heads),
            "num_kv_heads": np.full((1, 1), num_kv_heads),
        },
    )
    group = num_q_heads // num_kv_heads
    o, lse = np.zeros((rows, num_q_heads, v.shape[2])), np.zeros((rows, num_q_heads))
    made = (o, lse, np.zeros_like(lse) if max_scores is None else max_scores)
    for kv_head in range(num_kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        place = {
            "kv_head": np.full((1, 1), kv_head),
            # query rows and the heads of a group are one axis, row by row
            "q_head": np.tile(np.arange(heads.start, heads.stop), rows)[:, None],
            "q_pos": np.repeat(q_idx + kv_len - q_len, group)[:, None],
            "q_row": np.repeat(first_q_row + np.arange(rows), group)[:, None],
        }
        fused = q[:, heads].reshape(rows * group, head_dim)
        of_head = _attend(request, fused, k[:, kv_head], v[:, kv_head], kv_pos, place)
        for whole, part in zip(made, of_head, strict=True):
            whole[:, heads] = part.reshape(rows, group, *whole.shape[2:])
    return o, lse


def _check_shapes(q: Floats, k: Floats, v: Floats) -> None:
    for name, x, tokens in (("q", q, "rows"), ("k", k, "keys"), ("v", v, "keys")):
        if x.ndim != 3:
            one = "of one request: q[i], k[i] and v[i] of a batch"
            raise WrongShape(name=name, got=x.shape, expected=f"[{tokens}, heads, head_dim] {one}")
    if k.shape[2] != q.shape[2]:
        raise WrongShape(name="k", got=k.shape, expected=f"head_dim {q.shape[2]}, as q")
    if v.shape[:2] != k.shape[:2]:
        keys, heads = k.shape[:2]
        raise WrongShape(name="v", got=v.shape, expected=f"{keys} keys and {heads} heads, as k")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise WrongShape(name="q", got=q.shape, expected=f"a multiple of k's {k.shape[1]} heads")


def naive_attention(
    variant: Variant, q: Any, k: Any, v: Any, *, round_to: str = "bfloat16", **request: Any
) -> tuple[Floats, Floats]:
    """`reference_attention` in float32, with operands and probabilities stored in `round_to`."""
    round_ = rounder(round_to)
    o, lse = reference_attention(variant, q, k, v, precision=Precision(Array32, round_), **request)
    return round_(o), lse


def reference_batch(
    variant: Variant,
    q: Sequence[Any],
    k: Sequence[Any],
    v: Sequence[Any],
    *,
    round_to: str | None = None,
    **request: Any,
) -> tuple[list[Floats], list[Floats]]:
    """Attention of a batch, given and returned as lists with one entry for each request.

    Args:
        variant: as for `reference_attention`.
        q: one [rows, num_q_heads, head_dim_qk] for each request.
        k: one [keys, num_kv_heads, head_dim_qk] for each request.
        v: one [keys, num_kv_heads, head_dim_v] for each request.
        round_to: None for the oracle, a dtype's name for its naive low-precision twin.
        **request: further arguments of `reference_attention`, the same for all.

    Returns:
        Outputs and natural log-sum-exps, each a list with what `reference_attention` returns for
        one request.

    Raises:
        WrongShape: lists of different lengths, or tensors of a request that disagree.
        MissingInput, UnknownInput, WrongResult: as `reference_attention`.
    """
    for name, given in (("k", k), ("v", v)):
        if len(given) != len(q):
            expected = f"{len(q)} entries, as q has: one for each request"
            raise WrongShape(name=name, got=(len(given),), expected=expected)
    outputs, sums, first_row = [], [], 0
    for batch, (q_i, k_i, v_i) in enumerate(zip(q, k, v, strict=True)):
        where = {"batch": batch, "first_q_row": first_row, **request}
        if round_to is None:
            o, lse = reference_attention(variant, q_i, k_i, v_i, **where)
        else:
            o, lse = naive_attention(variant, q_i, k_i, v_i, round_to=round_to, **where)
        outputs.append(o)
        sums.append(lse)
        first_row += len(q_i)
    return outputs, sums


def reference_keys_values(
    variant: Variant,
    k: Any,
    v: Any,
    *,
    kv_pos: Any,
    kv_len: int,
    q_len: int,
    batch: int = 0,
    num_q_heads: int | None = None,
    inputs: Mapping[str, Any] | None = None,
    precision: Precision = _EXACT,
) -> tuple[Floats, Floats]:
    """What a variant's key and value transform make of tokens of one request.

    Args:
        variant: the functors; called on arrays, never traced.
        k: [tokens, num_kv_heads, head_dim_qk].
        v: [tokens, num_kv_heads, head_dim_v].
        kv_pos: [tokens] position of each.
        kv_len, q_len: keys and query rows of the request.
        batch: the request's index.
        num_q_heads: as many as key/value heads by default.
        inputs: run-time values of fields; they override those bound at construction.
        precision: float64 by default.

    Returns:
        New keys and values, shaped alike.

    Raises:
        MissingInput, UnknownInput, WrongResult: as `reference_attention`.
    """
    k, v = (precision.store(to_numpy(x)) for x in (k, v))
    heads = k.shape[1]
    reading = NumpyReading(variant.name, _values(variant, inputs), precision.array_class)
    given = {"batch": batch, "q_len": q_len, "kv_len": kv_len, "num_kv_heads": heads,
             "num_q_heads": heads if num_q_heads is None else num_q_heads}  # fmt: skip
    places = {name: np.full((1, 1), value) for name, value in given.items()}
    request = _Request(variant.under(reading), reading, precision, 1.0, places)
    made: tuple[Floats, Floats] = np.zeros(k.shape), np.zeros(v.shape)
    for head in range(heads):
        at = {"kv_head": np.full((1, 1), head), "kv_pos": to_numpy(kv_pos)[:, None]}
        made[0][:, head] = request.vector("key_transform", k[:, head], at)
        made[1][:, head] = request.vector("value_transform", v[:, head], at)
    return made


def visible(
    variant: Variant, *, q_len: int, kv_len: int, inputs: Mapping[str, Any] | None = None, **at: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The mask of one request and query head as a [q_len, kv_len] array of bools.

    Args:
        variant: its `logits_mask` is evaluated.
        q_len: query rows.
        kv_len: keys.
        inputs: run-time values of fields.
        **at: further positions (batch, q_head, kv_head, num_q_heads, num_kv_heads); 0, or 1 head.
    """
    reading = NumpyReading(variant.name, _values(variant, inputs))
    given = {"batch": 0, "q_head": 0, "kv_head": 0, "num_q_heads": 1, "num_kv_heads": 1, **at}
    values = {name: np.full((1, 1), value) for name, value in given.items()}
    rows = np.arange(q_len)[:, None]
    values |= {"q_len": np.full((1, 1), q_len), "kv_len": np.full((1, 1), kv_len)}
    values |= {"q_pos": rows + kv_len - q_len, "q_row": rows, "kv_pos": np.arange(kv_len)[None]}
    shadow = variant.under(reading)
    reading.hook = "logits_mask"
    mask = shadow.logits_mask(_position(reading, "logits_mask", values))
    return np.array(
        np.broadcast_to(check.array_result(variant, "logits_mask", mask), (q_len, kv_len))
    )


@dataclass(frozen=True)
class _Request:
    variant: Variant
    reading: NumpyReading
    precision: Precision
    sm_scale: float
    positions: Mapping[str, Floats]

    def run(self, hook: str, shape: tuple[int, ...], place: Mapping[str, Any], *value: Any) -> Any:
        """Call one hook and broadcast what it returns."""
        self.reading.hook = hook
        at = _position(self.reading, hook, {**self.positions, **place})
        result = getattr(self.variant, hook)(*map(self.reading.array, value), at)
        result = check.array_result(self.variant, hook, result)
        return self.reading.array(np.broadcast_to(result, shape))

    def vector(self, hook: str, x: Floats, place: Mapping[str, Any]) -> Any:
        self.reading.sizes["lane"] = x.shape[1]
        lanes = {"lane": np.arange(x.shape[1])[None], "head_dim": np.full((1, 1), x.shape[1])}
        return self.run(hook, x.shape, {**place, **lanes}, x)


def _attend(
    request: _Request, q: Floats, k: Floats, v: Floats, kv_pos: Floats, place: Mapping[str, Any]
) -> tuple[Floats, Floats, Floats]:
    """One key/value head: q [rows, d], k [keys, d], v [keys, d_v]; rows hold the whole group.

    Returns output, log-sum-exp and largest score.
    """
    store = request.precision.store
    per_key = {**place, "kv_pos": kv_pos[:, None]}
    q = store(request.vector("query_transform", q, place))
    k = store(request.vector("key_transform", k, per_key))
    v = store(request.vector("value_transform", v, per_key))
    shape = (q.shape[0], k.shape[0])
    per_pair = {**place, "kv_pos": kv_pos[None]}
    logits = request.run("logits_transform", shape, per_pair, request.sm_scale * (q @ k.T))
    mask = request.run("logits_mask", shape, per_pair)
    mask = mask & (kv_pos[None] < request.positions["kv_len"])
    request.reading.store_recorded(np.asarray(mask))
    if request.variant.softmax:
        o, lse, top = _softmax(np.where(mask, logits, -np.inf), v, store)
    else:
        o, lse = store(np.where(mask, logits, 0.0)) @ v, np.zeros((q.shape[0], 1))
        top = lse
    return request.vector("output_transform", o, {**place, "lse": lse}), lse, top


def _softmax(
    logits: Floats, v: Floats, store: Callable[[Floats], Floats]
) -> tuple[Floats, Floats, Floats]:
    top = np.max(logits, axis=1, keepdims=True, initial=-np.inf)
    # Infinity is not subtracted: it weighs infinity, and beside it what is finite weighs nothing.
    weighed = np.where(np.isposinf(top) & np.isfinite(logits), -np.inf, logits)
    shifted = np.exp(weighed - np.where(np.isinf(top), 0.0, top))
    total = np.sum(shifted, axis=1, keepdims=True)
    empty = total == 0
    with np.errstate(invalid="ignore"):  # infinite weights of zeros are NaN, as on a device
        o = (store(shifted) @ v) / np.where(empty, 1.0, total)
    lse = np.where(empty, -np.inf, top + np.log(np.where(empty, 1.0, total)))
    return o, lse, top


def _position(reading: NumpyReading, hook: str, values: Mapping[str, Any]) -> Position:
    return Position(hook, {name: reading.array(value) for name, value in values.items()})


def _values(variant: Variant, inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(inputs, Mapping | None):
        raise ArgumentError(name="inputs", reason=f"is {inputs!r}; expected values by name")
    known = variant.fields()
    for name in inputs or {}:
        if name not in known:
            raise UnknownInput.of(variant.name, name, list(known))
    return {**variant.inputs(), **(inputs or {})}
