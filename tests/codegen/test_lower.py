"""Lowered C++: its text for small graphs, and its values for random functors against NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.infix import INFIX

from warploom.codegen.abi import Packer, param_fields, struct_text
from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.lowering.lower import Block, constant_text
from warploom.codegen.source import KernelSource
from warploom.dsl.types.dtypes import float32, int32
from warploom.dsl.types.formats import Dense
from warploom.dsl.types.ir import Kind, Node, Source, const, node, var
from warploom.dsl.types.spec import AttentionSpec, TensorField
from warploom.dsl.values import functions as wl
from warploom.dsl.values.position import Position
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.readings import NumpyReading
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.errors import CannotTrace

FLOAT, INT, BOOL = Kind.FLOAT, Kind.INT, Kind.BOOL
x = node("logits", FLOAT)
q, k = var("q_pos"), var("kv_pos")


def text(root: Node, **tensors: TensorField) -> str:
    """The last line, or all lines, of a body that returns `root`; nodes that other tests made first
    have places, which are left out."""
    block = Block(tensors, indent=0)
    (result,) = block.compute([root])
    return KernelSource("", "\n".join([*block.statements, result]), "cpp", "").code


def binary(op: str, kind: Kind, a: Node, b: Node) -> Node:
    return node(op, kind, (a, b))


def test_operators_keep_python_grouping() -> None:
    difference = binary("sub", INT, q, k)
    assert text(binary("sub", INT, q, difference)) == "row.q_pos - (row.q_pos - kv_pos)"
    assert text(binary("sub", INT, difference, q)) == "row.q_pos - kv_pos - row.q_pos"
    doubled = binary("mul", INT, difference, const(2))
    assert text(binary("add", INT, doubled, q)) == "(row.q_pos - kv_pos) * 2 + row.q_pos"
    third = binary("div", FLOAT, x, binary("mul", FLOAT, x, const(3.0)))
    assert text(third) == "logits / (logits * 3.0f)"
    assert text(node("neg", FLOAT, (binary("add", FLOAT, x, const(1.0)),))) == "-(logits + 1.0f)"
    assert text(node("neg", FLOAT, (const(-1.0),))) == "-(-1.0f)"


def test_logic_is_branch_free() -> None:
    near, odd = binary("lt", BOOL, q, k), binary("eq", BOOL, k, const(1))
    both = binary("and", BOOL, near, node("not", BOOL, (odd,)))
    assert text(both) == "(row.q_pos < kv_pos) & !(kv_pos == 1)"
    assert text(node("select", FLOAT, (near, x, const(0.0)))) == (
        "row.q_pos < kv_pos ? logits : 0.0f"
    )


def test_division_by_powers_of_two_is_a_shift() -> None:
    assert text(binary("floordiv", INT, q, const(8))) == "row.q_pos >> 3"
    assert text(binary("mod", INT, q, const(8))) == "row.q_pos & 7"
    assert text(binary("mod", INT, q, const(-8))) == "mod(row.q_pos, -8)"
    assert text(binary("floordiv", INT, q, const(6))) == "floordiv(row.q_pos, 6)"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("q_row", "row.q_row << 2"), ("q_pos", "shl(row.q_pos, 2)")],  # q_pos can be below 0
)
def test_shifts_to_the_left_are_plain_where_cpp_defines_them(value: str, expected: str) -> None:
    assert text(binary("shl", INT, var(value), const(2))) == expected


def test_kinds_are_converted_where_they_differ() -> None:
    assert text(binary("mul", FLOAT, x, q)) == "logits * float(row.q_pos)"
    assert text(binary("lt", BOOL, x, q)) == "logits < float(row.q_pos)"
    assert text(node("to_int", INT, (x,))) == "to_int(logits)"


def test_shared_expressions_are_named_once() -> None:
    size = binary("mul", FLOAT, x, x)
    assert text(binary("add", FLOAT, size, binary("div", FLOAT, const(1.0), size))) == (
        "const float v0 = logits * logits;\nv0 + 1.0f / v0"
    )


def test_precise_functions() -> None:
    assert text(node("exp", FLOAT, (x,))) == "exp(logits)"
    assert text(node("exp", FLOAT, (x,), ("precise",))) == "precise::exp(logits)"


def test_loads_are_clamped_unless_their_role_is_safe() -> None:
    field = TensorField("w", float32, ("q_head", None))
    load = node("load", FLOAT, (var("q_head"), binary("sub", INT, q, k)), "w")
    assert text(load, w=field) == (
        "const int v0 = row.q_pos - kv_pos;\n"
        "load(p.x_w, row.q_head * p.x_w_s0 + clamp_index(v0, p.x_w_n1) * p.x_w_s1)"
    )
    shifted = node("load", FLOAT, (binary("add", INT, var("q_head"), const(1)), q), "w")
    assert "clamp_index(v0, p.x_w_n0)" in text(shifted, w=field)
    swapped = node("load", FLOAT, (var("batch"), q), "w")  # safe elsewhere, not here
    assert "clamp_index(tile.batch, p.x_w_n0)" in text(swapped, w=field)
    assert text(node("load", INT, (), "n"), n=TensorField("n", int32, ())) == "load(p.x_n, 0)"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.1, "0.1f"),
        (1 / 3, "0.33333334f"),
        (1e-30, "1e-30f"),
        (2.0, "2.0f"),
        (float("inf"), "kInfinity"),
        (-float("inf"), "-kInfinity"),
        (1e300, "kInfinity"),
        (float("nan"), "kNaN"),
        (True, "true"),
        (7, "7"),
        (-(2**31), "(-2147483647 - 1)"),
    ],
)
def test_constants_are_exact(value: float, expected: str) -> None:
    assert constant_text(const(value)) == expected


def test_integers_beyond_32_bits_are_refused() -> None:
    with pytest.raises(CannotTrace, match="4294967296"):
        constant_text(const(2**32))


def test_places_are_comments_that_no_key_sees() -> None:
    source = Source("/home/me/mine.py", 12, 5, "logits_transform", "    return a * \\\n")
    root = node("mul", FLOAT, (const(123.0), x), source=source)
    block = Block({})
    (result,) = block.compute([root])
    block.finish(f"return {result};", root.source)
    assert block.statements == ["    return 123.0f * logits;  //@ mine.py:12: return a *"]
    kernel = KernelSource("k", "\n".join([*block.statements, "}"]), "cpp")
    assert kernel.code == "    return 123.0f * logits;\n}"


# --- random functors: the same Python function gives C++ and the expected values

ints = st.recursive(
    st.one_of(
        st.sampled_from(("q_pos", "kv_pos", "q_head", "kv_len", "q_idx", "batch")).map(
            lambda name: ("at", name)
        ),
        st.integers(-5, 9).map(lambda n: ("const", n)),
        st.just(("field", "offset")),
    ),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(("+", "-", "min", "max")), inner, inner),
        st.tuples(st.sampled_from(("//", "%")), inner, st.integers(-4, 8).filter(bool)),
        st.tuples(st.sampled_from(("abs", "neg", "shr", "bits", "shl", "ids")), inner),
        st.tuples(st.sampled_from(("hash", "far", "huge")), inner),
        st.tuples(st.sampled_from(("<<", ">>", "*")), inner, inner),
    ),
    max_leaves=5,
)
conditions = st.recursive(
    st.tuples(st.sampled_from(("<", "<=", ">", ">=", "==", "!=")), ints, ints),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(("&", "|", "^")), inner, inner), st.tuples(st.just("~"), inner)
    ),
    max_leaves=3,
)
# bounded and smooth, so that fp32 stays close to float64
floats = st.recursive(
    st.one_of(
        st.just(("logits",)),
        st.floats(-2, 2, width=16).map(lambda v: ("const", v)),
        st.just(("field", "cap")),
        ints.map(lambda tree: ("smooth", tree)),
        ints.map(lambda tree: ("slopes", tree)),
    ),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(("+", "-", "min", "max")), inner, inner),
        st.tuples(st.sampled_from(("tanh", "sigmoid", "sin", "cos", "abs", "neg", "erf")), inner),
        st.tuples(st.sampled_from(("log1p", "expm1", "atan", "sinh", "cosh", "tan")), inner),
        st.tuples(st.sampled_from(("tell", "fmod")), inner, inner),
        st.tuples(st.sampled_from(("gauss", "root", "log", "damped", "precise", "pow")), inner),
        st.tuples(st.just("choose"), conditions, inner, inner),
    ),
    max_leaves=6,
)

OPERATIONS: dict[str, Callable[..., Any]] = {
    **INFIX,
    "min": wl.minimum,
    "max": wl.maximum,
    "abs": wl.abs,
    "neg": lambda a: -a,
    "shr": lambda a: a >> 1,
    "shl": lambda a: a << 2,
    "bits": lambda a: (a & 12) ^ (a | 3),
    "choose": wl.where,
    "tanh": wl.tanh,
    "sigmoid": wl.sigmoid,
    "sin": wl.sin,
    "cos": wl.cos,
    "erf": wl.erf,
    "log1p": lambda a: wl.log1p(wl.abs(a)),
    "expm1": lambda a: wl.expm1(-wl.abs(a)),
    "atan": wl.atan,
    "sinh": lambda a: wl.sinh(wl.tanh(a)),
    "cosh": lambda a: wl.cosh(wl.tanh(a)),
    "tan": lambda a: wl.tan(wl.tanh(a)),
    "fmod": lambda a, b: wl.fmod(wl.tanh(a), 2.0 + wl.abs(b)),
    "tell": lambda a, b: wl.where(wl.isnan(a) | wl.isinf(a), 0.0, b),
    "gauss": lambda a: wl.exp(-a * a),
    "root": lambda a: wl.sqrt(1.0 + a * a),
    "log": lambda a: wl.log(1.0 + a * a),
    "damped": lambda a: a / (1.0 + wl.abs(a)),
    "precise": lambda a: wl.tanh(wl.sin(a, precise=True), precise=True),
    "pow": lambda a: (1.5 + wl.sin(a)) ** 1.5 + wl.tanh(a) ** 3,
    "smooth": lambda a: wl.tanh(a * 0.1),
    # what 32 bits may not hold
    "hash": lambda a: a * 1103515245 + 12345,
    "far": lambda a: (2**31 - 3) - a,
    "huge": lambda a: wl.to_int(a * 1e9),
}


class Functor(Variant):
    cap = Scalar("float32", default=1.25)
    offset = Scalar("int32", default=3)
    slopes = Tensor("float32", ("q_head", None))
    ids = Tensor("int32", (None,))

    def __init__(self, logits: Any, mask: Any) -> None:
        super().__init__()
        self.trees = (logits, mask)

    def logits_transform(self, logits: Any, at: Position) -> Any:
        return self._read(self.trees[0], at, logits) + 0.0 * logits

    def logits_mask(self, at: Position) -> Any:
        return self._read(self.trees[1], at, None) & (at.kv_pos >= 0)

    def _read(self, tree: Any, at: Position, logits: Any) -> Any:
        if isinstance(tree, int):
            return tree
        op, *args = tree
        if op == "at":
            return getattr(at, args[0])
        if op == "const":
            return args[0] + 0 * at.q_len  # a symbol, also where the tree is constants only
        if op == "field":
            return getattr(self, args[0])
        if op == "logits":
            return logits
        values = [self._read(arg, at, logits) for arg in args]
        if op == "slopes":
            return self.slopes[at.q_head, values[0]]
        return self.ids[values[0]] if op == "ids" else OPERATIONS[op](*values)


# one example is one compilation of many cases
HEAVY = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large)
ROWS, KEYS, HEADS = 6, 11, 2
INPUTS: dict[str, Any] = {
    "slopes": np.random.default_rng(0).normal(size=(HEADS, 5)).astype(np.float32),
    "ids": np.random.default_rng(1).integers(-3, 9, 7, dtype=np.int32),
}


def case_text(index: int, spec: AttentionSpec) -> str:
    return f"""
namespace warploom {{ namespace case{index} {{
{struct_text(param_fields(spec))}
{variant_struct(spec.variant, "cpp")}
}} }}
extern "C" void run{index}(const void* params, const warploom::TileInfo* tile, int rows, int keys,
                           const warploom::RowInfo* row, const float* in, float* out, int* seen) {{
  using namespace warploom::case{index};
  const Params& p = *static_cast<const Params*>(params);
  const auto ts = Variant::tile_state(p, *tile);
  for (int r = 0; r < rows; ++r) {{
    const auto rs = Variant::row_state(p, *tile, ts, row[r]);
    for (int k = 0; k < keys; ++k) {{
      const auto cs = Variant::col_state(p, *tile, ts, k);
      const int i = r * keys + k;
      out[i] = Variant::logits(p, *tile, ts, row[r], rs, k, cs, in[i]);
      seen[i] = Variant::mask(p, *tile, ts, row[r], rs, k, cs);
    }}
  }}
}}
"""


def pack(spec: AttentionSpec) -> bytes:
    names = Packer(param_fields(spec)).names
    values: dict[str, int | float] = dict.fromkeys(names, 0)
    values |= {"x_cap": 1.25, "x_offset": 3}
    for name, array in INPUTS.items():
        values[f"x_{name}"] = array.ctypes.data
        for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
            values |= {f"x_{name}_n{axis}": size, f"x_{name}_s{axis}": stride // array.itemsize}
    return Packer(param_fields(spec)).pack({name: values[name] for name in names})


def expected(variant: Variant, tile: list[int], rows: Any, logits: Any) -> tuple[Any, Any]:
    reading = NumpyReading(variant.name, INPUTS)
    names = ("batch", "kv_head", "q_len", "kv_len", "num_q_heads", "num_kv_heads")
    values = {name: np.full((1, 1), v) for name, v in zip(names, tile, strict=True)}
    values |= dict(zip(("q_pos", "q_head", "q_row"), np.hsplit(rows, 3), strict=True))
    values["kv_pos"] = np.arange(KEYS)[None]
    arrays = {name: reading.array(np.asarray(v)) for name, v in values.items()}
    shadow = variant.under(reading)
    found = shadow.logits_transform(
        reading.array(logits.astype(np.float64)), Position("logits_transform", arrays)
    )
    mask = shadow.logits_mask(Position("logits_mask", arrays))
    return (np.broadcast_to(np.asarray(a), (ROWS, KEYS)) for a in (found, mask))  # type: ignore


@settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=HEAVY,
)
@given(
    trees=st.lists(st.tuples(floats, conditions), min_size=30, max_size=30),
    seed=st.integers(0, 2**32 - 1),
)
def test_cpp_computes_what_the_functor_says(
    trees: list[Any], seed: int, compile_cpp: Callable[..., ctypes.CDLL]
) -> None:
    variants = [Functor(*tree) for tree in trees]
    specs = [AttentionSpec(trace(v), 64, 64, float32, Dense()) for v in variants]
    cases = "".join(case_text(i, spec) for i, spec in enumerate(specs))
    library = compile_cpp("#include <warploom/variant.hpp>\n" + cases, "-O1")
    rng = np.random.default_rng(seed)
    for i, (variant, spec) in enumerate(zip(variants, specs, strict=True)):
        tile = [int(rng.integers(0, 3)), 0, 9, KEYS, HEADS, 1]
        rows = np.stack(
            [rng.integers(-3, KEYS, ROWS), np.arange(ROWS) % HEADS, np.arange(ROWS)], axis=1
        )
        logits = rng.normal(size=(ROWS, KEYS)).astype(np.float32) * 3
        out, seen = np.empty_like(logits), np.empty((ROWS, KEYS), np.int32)
        given_rows = rows.astype(np.int32)
        pointers = (a.ctypes.data_as(ctypes.c_void_p) for a in (given_rows, logits, out, seen))
        getattr(library, f"run{i}")(
            pack(spec), np.array(tile, np.int32).ctypes.data_as(ctypes.c_void_p), ROWS, KEYS,
            *pointers,
        )  # fmt: skip
        wanted, mask = expected(variant, tile, rows, logits)
        np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5, err_msg=str(trees[i]))
        np.testing.assert_array_equal(seen.astype(bool), mask, err_msg=str(trees[i]))
