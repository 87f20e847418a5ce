"""Rows whose sines follow from those of other rows, their text run by fibers on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.emulator import compile_for_fibers

import warploom as wl
from warploom.codegen.attention.templates import render_cuda
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import float16
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.scheduler.model.layout import c_structs

ROWS = 128

_HEADERS = """
#include <warploom/hooks/sine_recurrence.cuh>
namespace warploom {  // what the kernel's text names besides
struct TensorMap {};
namespace hopper {
template <class K>
struct Shared;
}
}  // namespace warploom
"""
_HARNESS = """
namespace warploom {
char shared_memory[1 << 16];
template <class K>
struct OwnFacts {
  ItemFacts<K>* own;
  const ItemFacts<K>& facts() const { return *own; }
};
struct Rotated : Kernel {
  template <class K>
  using Arena = OwnFacts<K>;
};
template <int kRows, int kBlock>
struct PlainTile {  // panels, without a swizzle
  static constexpr int kWidth = kBlock;
  static int offset(int row, int lane) {
    return (lane / kBlock * kRows + row) * kBlock + lane % kBlock;
  }
};
}  // namespace warploom
extern "C" __attribute__((visibility("default"))) bool transform(
    uint16_t* staged, int first, int count, float theta, int descending) {
  using namespace warploom;
  using K = Rotated;
  using Hook = $HOOKHook<K>;
  if constexpr (has_sine_recurrence<Hook, K>()) {
    static Params p;
    p.$THETA
    static ItemFacts<K> facts;
    facts.kv_pos = first;
    facts.places = {0, count};
    fibers::run(1, 128, descending != 0, [=] {
      const Item<K> item{p, {&facts}};
      const RecurrentRows<Hook, PlainTile<$ROWS, Sizes<K>::kBlock>, $ROWS, 128, K> rows(
          item, threadIdx.x);
      rows.transform(reinterpret_cast<K::Config::Element*>(staged),
                     Columns<K>(item, Visit(0, TileClass::kFull), nullptr));
    });
    return true;
  }
  return false;
}
"""


def build(variant: Variant, dim: int, folder: Path) -> Callable[..., bool]:
    """The function that transforms a tile of keys, or of values if only those have a hook."""
    traced = trace(variant)
    spec = AttentionSpec(traced, dim, dim, float16, wl.Ragged())
    hook = "Key" if "key_transform" in traced.hooks else "Value"
    has_theta = any(field.name == "rope_theta" for field in traced.scalars)
    harness = _HARNESS.replace("$HOOK", hook).replace("$ROWS", str(ROWS))
    harness = harness.replace("p.$THETA", "p.x_rope_theta = theta;" if has_theta else "")
    text = render_cuda(spec, TileConfig(64, 64, 4, 2, "hopper", 2), c_structs()).text
    structs = text[text.index("namespace warploom {") : text.index('extern "C"')]
    run = compile_for_fibers(_HEADERS + structs + harness, folder / "turned.cpp")["transform"]
    run.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_float, ctypes.c_int)
    run.restype = ctypes.c_bool
    return run  # type: ignore[no-any-return]


def rotated(x: Any, positions: Any, theta: float, dim: int, interleaved: bool) -> Any:
    """Rope's definition, in double precision."""
    half = dim // 2
    angles = positions[:, None] * theta ** (-2.0 / dim * np.arange(half))
    first, second = (
        (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, half), slice(half, dim))
    )
    out = x.astype(np.float64)
    a, b = out[:, first].copy(), out[:, second].copy()
    out[:, first] = a * np.cos(angles) - b * np.sin(angles)
    out[:, second] = b * np.cos(angles) + a * np.sin(angles)
    return out


def staged(x: Any) -> Any:
    """Rows as panels of 64 lanes."""
    return x.reshape(ROWS, -1, 64).swapaxes(0, 1).copy()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("head_dim", "dim", "interleaved"),
    [(128, 128, False), (128, 128, True), (64, 64, False), (64, 32, False), (64, 48, True)],
)
def test_keys_are_rotated(head_dim: int, dim: int, interleaved: bool, tmp_path: Path) -> None:
    run = build(wl.Rope(interleaved=interleaved, dim=dim), head_dim, tmp_path)
    x = np.random.default_rng(0).standard_normal((ROWS, head_dim)).astype(np.float16)
    for descending, first, theta in ((0, 0, 1e4), (1, 128, 5e5), (0, 3968, 1e4)):
        tile = staged(x)
        assert run(tile.ctypes.data, first, ROWS, theta, descending)
        found = tile.swapaxes(0, 1).reshape(ROWS, head_dim)
        expected = rotated(x, first + np.arange(ROWS), theta, dim, interleaved)
        angle_error = 2.0**-23 * (first + ROWS) * 2  # of float32 frequencies and products
        assert np.abs(found - expected).max() < 2.0**-9 + 4 * angle_error


class Swinging(wl.Variant):
    def value_transform(self, v: Value, at: Position) -> Value:
        return v + wl.cos(0.25 * (2 * at.kv_pos + at.batch) - at.lane / 7.0) - wl.sin(at.kv_pos)


def test_values_that_do_not_exist_stay_zeros(tmp_path: Path) -> None:
    run = build(Swinging(), 64, tmp_path)
    tile = np.zeros((1, ROWS, 64), np.float16)
    assert run(tile.ctypes.data, 1000, 77, 0.0, 0)
    at, lane = np.arange(1000, 1000 + ROWS)[:, None], np.arange(64)
    expected = np.cos(0.5 * at - lane / 7.0) - np.sin(at)
    assert np.abs(tile[0, :77] - expected[:77]).max() < 2.0**-9
    assert not tile[0, 77:].any()
