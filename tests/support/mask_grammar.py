"""Random masks from a grammar: a tree of tuples, read by one variant; its inputs, and tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from support.infix import INFIX
from warploom.dsl.types.ir import Node
from warploom.dsl.values import functions as wl
from warploom.dsl.values.evaluate import evaluate
from warploom.dsl.values.functions import abs as abs_
from warploom.dsl.values.functions import maximum, minimum, tanh, to_float, to_int, where
from warploom.dsl.values.position import Position
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.variant import Variant

BATCHES, GROUP, KV_HEADS, LONGEST = 3, 2, 2, 24
TABLE = 30
ENDS = np.array([-(2**31), -(2**31) + 1, 2**31 - 2, 2**31 - 1], np.int32)

POSITIONS = ("q_pos", "kv_pos", "q_idx", "q_head", "kv_head", "q_len", "kv_len", "batch")
small = st.integers(-9, 9)
leaves = st.one_of(
    st.sampled_from(POSITIONS[:2]).map(lambda name: ("at", name)),
    st.sampled_from(POSITIONS).map(lambda name: ("at", name)),
    small.map(lambda n: ("const", n)),
    st.sampled_from(("a", "b")).map(lambda name: ("field", name)),
    st.just(("per_batch",)),
    st.just(("per_head",)),
    st.just(("per_query_head",)),
)


def grow_numbers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    two = st.tuples(inner, inner)
    return st.one_of(
        st.tuples(st.sampled_from(("+", "-", "-", "min", "max", "*")), inner, inner),
        st.tuples(st.sampled_from(("//", "%")), inner, st.integers(-7, 7).filter(bool)),
        st.tuples(st.sampled_from(("//", "%")), inner, st.just(("field", "b"))),
        st.tuples(st.sampled_from(("abs", "neg", "table", "shr", "low_bits", "round")), inner),
        st.tuples(st.sampled_from(("hash", "far", "up", "huge")), inner),
        st.tuples(st.sampled_from(("<<", ">>")), inner, inner),
        two.map(lambda t: ("choose", ("<", ("at", "kv_pos"), t[0]), t[1], t[0])),
    )


numbers = st.recursive(leaves, grow_numbers, max_leaves=5)
comparisons = st.one_of(
    st.tuples(st.sampled_from(("<", "<=", ">", ">=", "==", "!=")), numbers, numbers),
    st.tuples(st.sampled_from(("f<", "f>=")), numbers, numbers),
    st.tuples(st.just("curve"), st.integers(0, 8), numbers, numbers),
    st.sampled_from((("flag",), ("query_flag",), ("reach",))),
)


def grow_conditions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(st.sampled_from(("&", "|", "^", "&", "|")), inner, inner),
        st.tuples(st.just("~"), inner),
        st.tuples(st.just("choose"), inner, inner, inner),
    )


masks = st.recursive(comparisons, grow_conditions, max_leaves=4)

OPERATIONS: dict[str, Callable[..., Any]] = {
    **INFIX,
    "min": minimum,
    "max": maximum,
    "abs": abs_,
    "neg": lambda x: -x,
    "shr": lambda x: x >> 2,
    "low_bits": lambda x: x & 7,
    "round": lambda x: to_int(to_float(x) * 0.7),
    "choose": where,
    # what 32 bits may not hold
    "hash": lambda x: x * 1103515245 + 12345,
    "far": lambda x: x + (2**31 - 8),
    "up": lambda x: x << 28,
    "huge": lambda x: to_int(to_float(x) * 4e8),
}


# of numbers from -20 to 20: some fall or leap, others are NaN or infinite for a part of them
CURVES: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: wl.log1p(x * 0.2),
    lambda x, y: wl.expm1(x * 0.3),
    lambda x, y: wl.tan(x * 0.2),
    lambda x, y: wl.atan(x * 0.2) * 9.0,
    lambda x, y: wl.sinh(x * 0.3),
    lambda x, y: wl.cosh(x * 0.3),
    lambda x, y: wl.fmod(x * 0.7, y),
    lambda x, y: where(wl.isnan(wl.log1p(x * 0.2)) ^ (y > 3.0), y, -y),
    lambda x, y: where(wl.isinf(1.0 / x), x, y - 2.0),
)


class Grammar(Variant):
    a = Scalar("int32")
    b = Scalar("int32")
    f = Scalar("float32", default=0.25)
    per_batch = Tensor("int32", ("batch",))
    per_head = Tensor("int32", ("kv_head",))
    per_query_head = Tensor("int32", ("q_head",))
    flags = Tensor("bool", ("batch",))
    query_flags = Tensor("bool", ("q_head",))
    reach = Tensor("float32", ("q_head",))
    table = Tensor("int32", (None,))

    def __init__(self, tree: Any) -> None:
        super().__init__()
        self.tree = tree

    def logits_mask(self, at: Position) -> Any:
        # a key that no leaf of the tree mentions would make a Python bool
        return self._read(self.tree, at) & (at.kv_pos >= -1)

    def _read(self, tree: Any, at: Position) -> Any:
        if isinstance(tree, int):
            return tree
        op, *args = tree
        if op == "at":
            return getattr(at, args[0])
        if op == "const":
            return args[0] + 0 * at.q_len
        if op == "field":
            return getattr(self, args[0])
        if op == "per_batch":
            return self.per_batch[at.batch]
        if op == "per_head":
            return self.per_head[at.kv_head]
        if op == "per_query_head":
            return self.per_query_head[at.q_head]
        if op == "flag":
            return self.flags[at.batch]
        if op == "query_flag":
            return self.query_flags[at.q_head]
        if op == "reach":
            return self.reach[at.q_head] < 5.0
        values = [self._read(arg, at) for arg in args]
        if op == "curve":
            x, y = (wl.clamp(to_float(value), -20.0, 20.0) for value in values[1:])
            return CURVES[values[0]](x, y) < y * 0.26
        if op == "table":
            return self.table[maximum(values[0], 0)]
        if op in ("f<", "f>="):
            x, y = (to_float(value) for value in values)
            scaled = tanh(x * self.f) * 6.0 + y / 3.0
            return scaled < abs_(y) if op == "f<" else scaled >= x * 0.1
        return OPERATIONS[op](*values)


def random_inputs(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "a": int(rng.choice([rng.integers(-12, 13), rng.integers(-(2**31), 2**31)], p=[0.8, 0.2])),
        "b": int(rng.choice([-5, -1, 1, 2, 4, 8])),
        "f": float(np.float32(rng.normal())),
        "per_batch": rng.choice(ENDS, BATCHES)
        if rng.random() < 0.1
        else rng.integers(-4, LONGEST, BATCHES, dtype=np.int32),
        "per_head": rng.integers(0, 10, KV_HEADS, dtype=np.int32),
        "per_query_head": rng.integers(-9, 10, GROUP * KV_HEADS, dtype=np.int32),
        "flags": rng.integers(0, 2, BATCHES).astype(bool),
        "query_flags": rng.integers(0, 2, GROUP * KV_HEADS).astype(bool),
        "reach": rng.choice([3.0, 3.0, 7.0, np.nan], GROUP * KV_HEADS).astype(np.float32),
        "table": rng.integers(-5, 20, TABLE, dtype=np.int32),
    }


def random_tiles(rng: np.random.Generator, count: int) -> dict[str, Any]:
    """Positions as `TileAnalysis` takes them, inside the request and the sequence."""
    kv_len = rng.integers(1, LONGEST, count)
    q_len = rng.integers(1, LONGEST, count)
    first_q = kv_len - q_len + (rng.random(count) * q_len).astype(int)
    last_q = first_q + (rng.random(count) * (kv_len - first_q)).astype(int)
    first_k = (rng.random(count) * kv_len).astype(int)
    last_k = first_k + (rng.random(count) ** 2 * (kv_len - first_k)).astype(int)
    kv_head = rng.integers(0, KV_HEADS, count)
    first_head = kv_head * GROUP + rng.integers(0, 2, count)
    return {
        "batch": rng.integers(0, BATCHES, count),
        "kv_head": kv_head,
        "q_len": q_len,
        "kv_len": kv_len,
        "num_q_heads": np.full(count, GROUP * KV_HEADS),
        "num_kv_heads": np.full(count, KV_HEADS),
        "q_pos": (first_q, last_q + 1),
        "kv_pos": (first_k, last_k + 1),
        "q_head": (first_head, (kv_head + 1) * GROUP),
    }


def elements(root: Node, inputs: dict[str, Any], tiles: dict[str, Any], i: int) -> Any:
    """Truth of a condition at every element [q_pos, q_head, kv_pos] of tile i."""
    positions = {
        name: np.asarray(value[i]) for name, value in tiles.items() if not isinstance(value, tuple)
    }
    for axis, name in enumerate(("q_pos", "q_head", "kv_pos")):
        begin, end = (ends[i] for ends in tiles[name])
        positions[name] = np.expand_dims(np.arange(begin, end), [x for x in range(3) if x != axis])
    tensors = {name: v for name, v in inputs.items() if isinstance(v, np.ndarray)}
    scalars = {name: v for name, v in inputs.items() if name not in tensors}
    return evaluate((root,), positions, scalars, tensors)[0]
