"""Tile analysis never contradicts the mask: random masks, random tiles, NumPy and compiled C++.

Masks come from a grammar and are real variants: the oracle is the plain functor on NumPy arrays,
so that tracing, analysis and lowering are all on trial.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from warploom.codegen.abi import Packer, param_fields, struct_text
from warploom.codegen.functors import variant_struct
from warploom.dsl.dtypes import float32
from warploom.dsl.fields import Scalar, Tensor
from warploom.dsl.formats import Dense
from warploom.dsl.functions import abs as abs_
from warploom.dsl.functions import maximum, minimum, tanh, to_float, to_int, where
from warploom.dsl.intervals import FULL, SKIP, TileAnalysis
from warploom.dsl.position import Position
from warploom.dsl.spec import AttentionSpec, TracedVariant
from warploom.dsl.trace import trace
from warploom.dsl.variant import Variant

# one example is one compilation of many cases
HEAVY = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large)
BATCHES, GROUP, KV_HEADS, LONGEST = 3, 2, 2, 24
TABLE = 30

# --- random masks: a tree of tuples, read by one variant

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
        two.map(lambda t: ("choose", ("<", ("at", "kv_pos"), t[0]), t[1], t[0])),
    )


numbers = st.recursive(leaves, grow_numbers, max_leaves=5)
comparisons = st.one_of(
    st.tuples(st.sampled_from(("<", "<=", ">", ">=", "==", "!=")), numbers, numbers),
    st.tuples(st.sampled_from(("f<", "f>=")), numbers, numbers),
    st.sampled_from((("flag",), ("query_flag",))),
)


def grow_conditions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(st.sampled_from(("&", "|", "^", "&", "|")), inner, inner),
        st.tuples(st.just("~"), inner),
        st.tuples(st.just("choose"), inner, inner, inner),
    )


masks = st.recursive(comparisons, grow_conditions, max_leaves=4)

OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "min": minimum,
    "max": maximum,
    "abs": abs_,
    "neg": lambda x: -x,
    "shr": lambda x: x >> 2,
    "low_bits": lambda x: x & 7,
    "round": lambda x: to_int(to_float(x) * 0.7),
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
    "&": lambda x, y: x & y,
    "|": lambda x, y: x | y,
    "^": lambda x, y: x ^ y,
    "~": lambda x: ~x,
    "choose": where,
}


class Grammar(Variant):
    a = Scalar("int32")
    b = Scalar("int32")
    f = Scalar("float32", default=0.25)
    per_batch = Tensor("int32", ("batch",))
    per_head = Tensor("int32", ("kv_head",))
    per_query_head = Tensor("int32", ("q_head",))
    flags = Tensor("bool", ("batch",))
    query_flags = Tensor("bool", ("q_head",))
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
        values = [self._read(arg, at) for arg in args]
        if op == "table":
            return self.table[maximum(values[0], 0)]
        if op in ("f<", "f>="):
            x, y = (to_float(value) for value in values)
            scaled = tanh(x * self.f) * 6.0 + y / 3.0
            return scaled < abs_(y) if op == "f<" else scaled >= x * 0.1
        return OPERATIONS[op](*values)


def random_inputs(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "a": int(rng.integers(-12, 13)),
        "b": int(rng.choice([-5, -1, 1, 2, 4, 8])),
        "f": float(np.float32(rng.normal())),
        "per_batch": rng.integers(-4, LONGEST, BATCHES, dtype=np.int32),
        "per_head": rng.integers(0, 10, KV_HEADS, dtype=np.int32),
        "per_query_head": rng.integers(-9, 10, GROUP * KV_HEADS, dtype=np.int32),
        "flags": rng.integers(0, 2, BATCHES).astype(bool),
        "query_flags": rng.integers(0, 2, GROUP * KV_HEADS).astype(bool),
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


def check_against_elements(
    elements: Callable[..., Any],
    variant: Variant,
    inputs: dict[str, Any],
    tiles: dict[str, Any],
    classes: Any,
    begins: Any,
    ends: Any,
) -> None:
    for i, (found, begin, end) in enumerate(zip(classes, begins, ends, strict=True)):
        seen = elements(variant, inputs, tiles, i)
        tile = seen[:, :, tiles["kv_pos"][0][i] : tiles["kv_pos"][1][i]]
        assert found != SKIP or not tile.any(), f"tile {i} is skipped, and has visible elements"
        assert found != FULL or tile.all(), f"tile {i} is called full, and has hidden elements"
        keys = np.flatnonzero(seen.any(axis=(0, 1)))
        assert 0 <= begin <= end <= tiles["kv_len"][i]
        assert not len(keys) or (begin <= keys[0] and keys[-1] < end), f"tile {i} loses keys"


def without(tiles: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in tiles.items() if key != name}


@settings(max_examples=250, deadline=None)
@given(tree=masks, seed=st.integers(0, 2**32 - 1), known=st.booleans())
def test_analysis_never_contradicts_the_mask(
    mask_elements: Callable[..., Any], tree: Any, seed: int, known: bool
) -> None:
    rng = np.random.default_rng(seed)
    variant, inputs, tiles = Grammar(tree), random_inputs(rng), random_tiles(rng, 12)
    tensors = {name: v for name, v in inputs.items() if isinstance(v, np.ndarray)}
    analysis = TileAnalysis(trace(variant), inputs, tensors if known else None)
    classes = analysis.classify(**tiles)
    begins, ends = analysis.kv_bounds(**without(tiles, "kv_pos"))
    check_against_elements(mask_elements, variant, inputs, tiles, classes, begins, ends)


# --- the same analysis as C++


def case_text(index: int, traced: TracedVariant, spec: AttentionSpec) -> str:
    return f"""
namespace warploom {{ namespace case{index} {{
{struct_text(param_fields(spec))}
{variant_struct(traced, "cpp")}
}} }}
extern "C" void analyse{index}(const void* params, int n, const warploom::TileInfo* tiles,
                               const warploom::Range* boxes, int* out) {{
  using namespace warploom::case{index};
  const Params& p = *static_cast<const Params*>(params);
  for (int i = 0; i < n; ++i) {{
    const warploom::Range* box = boxes + 3 * i;
    const warploom::Range keys = Variant::kv_bounds(p, tiles[i], box[0], box[2]);
    out[3 * i] = int(Variant::classify(p, tiles[i], box[0], box[1], box[2]));
    out[3 * i + 1] = keys.begin;
    out[3 * i + 2] = keys.end;
  }}
}}
"""


def pack(spec: AttentionSpec, inputs: dict[str, Any]) -> bytes:
    packer = Packer(param_fields(spec))
    values: dict[str, int | float] = dict.fromkeys(packer.names, 0)
    for name, value in inputs.items():
        if not isinstance(value, np.ndarray):
            values[f"x_{name}"] = value
        else:
            values |= {f"x_{name}": value.ctypes.data, f"x_{name}_n0": len(value)}
            values[f"x_{name}_s0"] = 1
    return packer.pack({name: values[name] for name in packer.names})


def run_cpp(function: Any, params: bytes, tiles: dict[str, Any]) -> np.ndarray[Any, Any]:
    fixed = ("batch", "kv_head", "q_len", "kv_len", "num_q_heads", "num_kv_heads")
    infos = np.stack([tiles[name] for name in fixed], axis=1).astype(np.int32)
    boxes = np.stack(
        [end for name in ("q_pos", "kv_pos", "q_head") for end in tiles[name]], axis=1
    ).astype(np.int32)
    out = np.empty((len(infos), 3), np.int32)
    pointers = (x.ctypes.data_as(ctypes.c_void_p) for x in (infos, boxes, out))
    function(params, len(infos), *pointers)
    return out


@settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=HEAVY,
)
@given(trees=st.lists(masks, min_size=25, max_size=25), seed=st.integers(0, 2**32 - 1))
def test_cpp_and_numpy_agree(
    trees: list[Any],
    seed: int,
    compile_cpp: Callable[..., ctypes.CDLL],
    mask_elements: Callable[..., Any],
) -> None:
    rng = np.random.default_rng(seed)
    variants = [Grammar(tree) for tree in trees]
    traced = [trace(variant) for variant in variants]
    specs = [AttentionSpec(each, 64, 64, float32, Dense()) for each in traced]
    cases = (case_text(i, *pair) for i, pair in enumerate(zip(traced, specs, strict=True)))
    library = compile_cpp("#include <warploom/variant.hpp>\n" + "".join(cases), "-O1")
    for i, (variant, spec) in enumerate(zip(variants, specs, strict=True)):
        inputs, tiles = random_inputs(rng), random_tiles(rng, 50)
        tensors = {name: v for name, v in inputs.items() if isinstance(v, np.ndarray)}
        used = {field.name for field in (*traced[i].scalars, *traced[i].tensors)}
        params = pack(spec, {name: v for name, v in inputs.items() if name in used})
        found = run_cpp(getattr(library, f"analyse{i}"), params, tiles)
        check_against_elements(mask_elements, variant, inputs, tiles, *found.T)
        analysis = TileAnalysis(traced[i], inputs, tensors)
        begins, ends = analysis.kv_bounds(**without(tiles, "kv_pos"))
        expected = np.stack([analysis.classify(**tiles), begins, ends], axis=1)
        np.testing.assert_array_equal(found, expected, err_msg=str(trees[i]))
