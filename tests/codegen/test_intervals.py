"""Tile analysis never contradicts the mask: random masks, random tiles, NumPy and compiled C++.

Masks come from a grammar (`support/mask_grammar.py`) and are real variants: the oracle is the plain
functor on NumPy arrays, so that tracing, analysis and lowering are all on trial.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.mask_grammar import Grammar, masks, random_inputs, random_tiles

from warploom.codegen.abi import Packer, param_fields, struct_text
from warploom.codegen.lowering.functors import variant_struct
from warploom.dsl.masks.intervals import FULL, SKIP, TileAnalysis
from warploom.dsl.types.dtypes import float32
from warploom.dsl.types.formats import Dense
from warploom.dsl.types.spec import AttentionSpec, TracedVariant
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant

# one example is one compilation of many cases
HEAVY = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large)


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
