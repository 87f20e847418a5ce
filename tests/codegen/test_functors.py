"""`struct Variant`: what is hoisted where, and the vector hooks run in C++ against NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import warploom as wl
from warploom.codegen.abi import Packer, param_fields, struct_text
from warploom.codegen.lowering.functors import scale_factors, variant_struct
from warploom.codegen.lowering.split import split
from warploom.dsl.types.dtypes import float32
from warploom.dsl.types.formats import Dense
from warploom.dsl.types.spec import AttentionSpec, TracedVariant
from warploom.dsl.values.custom import custom_function
from warploom.dsl.values.functions import (
    cos,
    exp,
    floor,
    max,
    mean,
    rotate_half,
    rotate_pairs,
    rsqrt,
    sin,
    where,
)
from warploom.dsl.values.functions import sum as sum_lanes
from warploom.dsl.values.position import Position
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.readings import NumpyReading
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.errors import UnsupportedSpec


class Everything(Variant):
    """Parts of every level: tile, row, column and element."""

    slopes = Tensor("float32", ("q_head",))
    weight = Tensor("float32", ("kv_pos",))
    window = Scalar("int32")

    def logits_transform(self, logits: Any, at: Position) -> Any:
        bias = self.slopes[at.q_head] * (at.kv_pos - at.q_pos)
        return logits * self.weight[at.kv_pos] + bias + at.kv_len * 0.5

    def logits_mask(self, at: Position) -> Any:
        return at.kv_pos > at.q_pos - 2 * self.window


def test_each_part_is_computed_where_it_belongs() -> None:
    hooks = trace(Everything()).hooks
    parts = split((hooks["logits_transform"], hooks["logits_mask"]))
    assert [node.op for node in parts.tile] == ["mul", "mul"]  # kv_len * 0.5, 2 * window
    assert [node.op for node in parts.row] == ["load", "sub"]  # slope, first visible key
    assert [node.op for node in parts.column] == ["load"]
    text = variant_struct(trace(Everything()), "cpp")
    assert "struct TileState { float t0; int t1; };" in text
    assert "struct RowState { float r0; float r1; int r2; };" in text  # and float(q_pos)
    assert "struct ColState { float c0; float c1; };" in text
    assert "return kv_pos > rs.r2;" in text
    assert "wrapped_difference(row.q_pos, ts.t1)" in text  # a window may be any int


def test_divisors_known_earlier_become_hoisted_reciprocals() -> None:
    class Divided(Variant):
        cap = Scalar("float32")

        def logits_transform(self, logits: Any, at: Position) -> Any:
            scaled = logits / self.cap + logits / 4.0 + logits / at.q_head
            return scaled / (1.0 + logits * logits)

    text = variant_struct(trace(Divided()), "cpp")
    assert "return {1.0f / p.x_cap};" in text
    assert "return {1.0f / float(row.q_head)};" in text
    assert "logits * ts.t0 + logits * 0.25f + logits * rs.r0" in text
    assert " / (1.0f + logits * logits);" in text  # its divisor is the element's own


def test_float_distances_are_differences_of_hoisted_floats() -> None:
    class Distant(Variant):
        def logits_transform(self, logits: Any, at: Position) -> Any:
            near = wl.to_float(wl.abs(at.q_pos - at.kv_pos))  # not a mere difference
            return logits + 0.5 * (at.kv_pos - at.q_pos) + near

    text = variant_struct(trace(Distant()), "cuda")
    assert "return {float(row.q_pos)};" in text
    assert "return {float(kv_pos)};" in text
    assert "0.5f * v0}" in text
    assert "ts.t1 * (cs.c0 - rs.r0)" in text
    assert "float(abs(row.q_pos - kv_pos))" in text


def test_distances_that_a_step_reads_are_whole_numbers_first() -> None:
    """Beyond 2^24 a difference of floats may be off by one, and the step be another."""

    class Stepped(Variant):
        def logits_transform(self, logits: Any, at: Position) -> Any:
            distance = wl.to_float(at.q_pos - at.kv_pos)
            return where(distance == 1.0, logits + 5.0, logits) + 0.5 * (at.kv_pos - at.q_pos)

    for language in ("cpp", "cuda"):
        text = variant_struct(trace(Stepped()), language)
        assert "float(row.q_pos - kv_pos) == 1.0f" in text
        assert "cs.c0 - rs.r0" in text  # no step reads that one


def test_divisions_that_a_step_or_the_mask_reads_stay() -> None:
    class Stepped(Variant):
        width = Scalar("float32")

        def logits_transform(self, logits: Any, at: Position) -> Any:
            near = logits / self.width
            shared = (at.q_pos + at.kv_pos) / 41.0
            return where(near > 3.0, near, floor(logits / 7.0)) + shared + logits / 47.0

        def logits_mask(self, at: Position) -> Any:
            return (at.q_pos + at.kv_pos) / 41.0 > 1.5

    cpp, cuda = (variant_struct(trace(Stepped()), language) for language in ("cpp", "cuda"))
    for text, logits in ((cpp, "logits"), (cuda, "v0")):
        assert f"{logits} / p.x_width" in text and f"floor({logits} / 7.0f)" in text
        assert " / 41.0f" in text and "0.02439" not in text  # 1 / 41
        assert f"{logits} * 0.0212765" in text  # 1 / 47


def test_only_changes_are_written() -> None:
    class Causal(Variant):
        def logits_mask(self, at: Position) -> Any:
            return at.kv_pos <= at.q_pos

    text = variant_struct(trace(Causal()), "cpp")
    assert "struct Variant : IdentityVariant<Params> {" in text
    for absent in ("State {", "float logits(", "query", "kSoftmax", "kHasLogitsTransform"):
        assert absent not in text
    assert variant_struct(trace(Variant()), "cpp").count("\n") <= 2

    class Linear(Variant):
        softmax = False

    assert "kSoftmax = false" in variant_struct(trace(Linear()), "cpp")


def test_custom_functions_come_first_and_need_text_of_the_language() -> None:
    twice = custom_function(
        "twice", cuda="WL_FN float twice(float x) { return x + x; }", python=lambda x: x + x
    )

    class Custom(Variant):
        def logits_transform(self, logits: Any, at: Position) -> Any:
            return twice(logits)

    text = variant_struct(trace(Custom()), "cuda")
    assert text.startswith("WL_FN float twice(float x)")
    assert "return warploom::twice(logits * positive_scale(p));" in text
    with pytest.raises(UnsupportedSpec, match="twice"):
        variant_struct(trace(Custom()), "cpp")


# --- vector hooks

HEAD_DIM, ROWS = 16, 5
HARNESS = """
#include <warploom/variant.hpp>
namespace warploom {
$PARAMS
$VARIANT
template <int kCount, int I = 0, class F> void each(const F& f) {  // f<0>(), f<1>(), ...
  if constexpr (I < kCount) { f.template run<I>(); each<kCount, I + 1>(f); }
}
struct Call { const Params& p; TileInfo tile; int head_dim; const float* in; float* r; };
#define HOOK(hook, Hook, Place, ...)                                                         \\
  struct Hook##Reduce {                                                                      \\
    const Call& c; Place at;                                                                 \\
    template <int I> void run() const {                                                      \\
      const auto x = [this](int lane) { return c.in[lane]; };                                \\
      float total = Variant::hook##_identity<I>();                                           \\
      for (int lane = 0; lane < c.head_dim; ++lane)                                          \\
        total = Variant::hook##_combine<I>(total, Variant::hook##_reduce<I>(                 \\
            c.p, c.tile, __VA_ARGS__, lane, c.head_dim, x, c.r));                            \\
      c.r[I] = total;                                                                        \\
    }                                                                                        \\
  };                                                                                         \\
  extern "C" void run_##hook(const Params* p, const TileInfo* tile, int rows, int head_dim,  \\
                             const Place* places, const float* in, float* out) {             \\
    for (int i = 0; i < rows; ++i) {                                                         \\
      const Place at = places[i];                                                            \\
      float r[8];                                                                            \\
      const Call c{*p, *tile, head_dim, in + i * head_dim, r};                               \\
      each<Variant::k##Hook##Reductions>(Hook##Reduce{c, at});                               \\
      const auto x = [&](int lane) { return c.in[lane]; };                                   \\
      const auto ts = Variant::hook##_tile(*p, *tile);                                       \\
      for (int lane = 0; lane < head_dim; ++lane) {                                          \\
        const auto ls = Variant::hook##_lane(*p, *tile, ts, lane, head_dim);                 \\
        out[i * head_dim + lane] =                                                           \\
            Variant::hook(*p, *tile, __VA_ARGS__, ls, lane, head_dim, x, r);                 \\
      }                                                                                      \\
    }                                                                                        \\
  }
struct Output { RowInfo row; float lse; };
HOOK(query, Query, RowInfo, at)
HOOK(key, Key, int, at)
HOOK(value, Value, int, at)
HOOK(output, Output, Output, at.row, at.lse)
}
"""


def test_frequencies_belong_to_the_lane_and_their_base_to_the_tile() -> None:
    text = variant_struct(trace(wl.Rope()), "cuda")
    assert "struct KeyTile { float t0; };" in text
    assert "return {precise::log2(p.x_rope_theta)};" in text
    assert "struct KeyLane { float l0; };" in text
    assert "precise::exp2(" in text.split("key_lane")[1].split("static float key(")[0]
    assert "exp2" not in text.split("static float key(")[1]
    assert "float(kv_pos) * ls.l0" in text


class Vectors(Variant):
    """Rotations, loads by lane, and reductions that read earlier reductions."""

    gain = Tensor("float32", ("lane",))
    scale = Tensor("float32", ("kv_head", "kv_pos"))
    theta = Scalar("float32", default=100.0)

    def query_transform(self, q: Any, at: Position) -> Any:
        angle = at.q_pos * self.theta ** (-2.0 * (at.lane % (at.head_dim // 2)) / at.head_dim)
        return q * cos(angle) + rotate_half(q) * sin(angle)

    def key_transform(self, k: Any, at: Position) -> Any:
        normed = k * rsqrt(mean(k * k) + 1e-3) * self.gain[at.lane]
        angle = at.kv_pos * (1.0 / (1 + at.lane // 2))
        return normed * cos(angle) + rotate_pairs(normed, 8) * sin(angle)

    def value_transform(self, v: Any, at: Position) -> Any:
        shifted = v - max(v)
        return exp(shifted) / sum_lanes(exp(shifted)) * self.scale[at.kv_head, at.kv_pos]

    def output_transform(self, o: Any, at: Position) -> Any:
        return o * (1.0 / (1.0 + exp(-at.lse))) + at.q_head


INPUTS: dict[str, Any] = {
    "gain": np.linspace(0.5, 1.5, HEAD_DIM, dtype=np.float32),
    "scale": np.random.default_rng(2).normal(size=(2, 7)).astype(np.float32),
}
PLACES = {
    "query_transform": (("q_pos", int), ("q_head", int), ("q_row", int)),
    "key_transform": (("kv_pos", int),),
    "value_transform": (("kv_pos", int),),
    "output_transform": (("q_pos", int), ("q_head", int), ("q_row", int), ("lse", float)),
}


def pack(traced: TracedVariant) -> tuple[str, bytes]:
    fields = param_fields(AttentionSpec(traced, HEAD_DIM, HEAD_DIM, float32, Dense()))
    values: dict[str, int | float] = {field.name: 0 for field in fields} | {"x_theta": 100.0}
    for name, array in INPUTS.items():
        values[f"x_{name}"] = array.ctypes.data
        for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
            values |= {f"x_{name}_n{axis}": size, f"x_{name}_s{axis}": stride // array.itemsize}
    return struct_text(fields), Packer(fields).pack(values)


def test_vector_hooks_compute_what_the_functor_says(
    compile_cpp: Callable[..., ctypes.CDLL],
) -> None:
    variant = Vectors()
    traced = trace(variant)
    params_text, params = pack(traced)
    text = HARNESS.replace("$PARAMS", params_text)
    text = text.replace("$VARIANT", variant_struct(traced, "cpp"))
    library = compile_cpp(text, "-O1")
    rng = np.random.default_rng(0)
    tile = {
        "batch": 0, "kv_head": 1, "q_len": 9, "kv_len": 9, "num_q_heads": 4, "num_kv_heads": 2
    }  # fmt: skip
    tile_bytes = np.array(list(tile.values()), np.int32)
    for hook, names in PLACES.items():
        place: dict[str, Any] = {name: rng.integers(0, 40, ROWS) for name, _ in names}
        if "q_head" in place:
            place["q_head"] %= 4
        if "lse" in place:
            place["lse"] = rng.normal(size=ROWS).astype(np.float32)
        types = [(name, np.float32 if kind is float else np.int32) for name, kind in names]
        places = np.zeros(ROWS, np.dtype(types))
        for name in place:
            places[name] = place[name]
        x = rng.normal(size=(ROWS, HEAD_DIM)).astype(np.float32)
        out = np.empty_like(x)
        pointers = (a.ctypes.data_as(ctypes.c_void_p) for a in (places, x, out))
        run = getattr(library, "run_" + hook.split("_")[0])
        run(params, tile_bytes.ctypes.data_as(ctypes.c_void_p), ROWS, HEAD_DIM, *pointers)

        reading = NumpyReading("Vectors", INPUTS)
        values = {name: np.full((1, 1), v) for name, v in tile.items()}
        values |= {name: v[:, None] for name, v in place.items()}
        values |= {"lane": np.arange(HEAD_DIM)[None], "head_dim": np.full((1, 1), HEAD_DIM)}
        at = Position(hook, {name: reading.array(v) for name, v in values.items()})
        wanted = getattr(variant.under(reading), hook)(reading.array(x.astype(np.float64)), at)
        np.testing.assert_allclose(out, np.asarray(wanted), rtol=1e-4, atol=2e-5, err_msg=hook)


def test_reductions_are_numbered_in_order_of_need() -> None:
    text = variant_struct(trace(Vectors()), "cpp")
    assert "kValueReductions = 2" in text and "kKeyReductions = 1" in text
    assert "kQueryReductions" not in text
    assert "return I == 0 ? -kInfinity : 0.0f;" in text  # the maximum comes before the sum


class Scaled(Variant):
    """Values times numbers that no lane changes, or one that a lane does."""

    scale = Tensor("float32", ("kv_pos",))

    def __init__(self, form: str) -> None:
        self._form = form

    def value_transform(self, v: Any, at: Position) -> Any:
        scale = self.scale[at.kv_pos]
        return {
            "right": v * scale,
            "left": scale * v,
            "width": v * (scale * at.head_dim),
            "twice": 0.5 * (v * scale),
            "lane": v * (scale * at.lane),
            "sum": v * sum_lanes(v),
            "shift": v * scale + 1.0,
            "other lane": rotate_half(v) * scale,
        }[self._form]


@pytest.mark.parametrize(
    ("form", "count"),
    [
        ("right", 1),
        ("left", 1),
        ("width", 1),
        ("twice", 2),
        ("lane", 0),
        ("sum", 0),
        ("shift", 0),
        ("other lane", 0),
    ],
)
def test_value_transforms_that_only_scale_are_told_apart(form: str, count: int) -> None:
    traced = trace(Scaled(form))
    assert len(scale_factors(traced.hooks["value_transform"])) == count
    text = variant_struct(traced, "cuda")
    assert ("kScalesValues" in text) == (count > 0)
