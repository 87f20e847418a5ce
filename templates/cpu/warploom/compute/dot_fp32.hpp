// The arithmetic of a matrix product in float32, on any machine. A product's operands are arrays of
// 32-bit words along the summed dimension; here a word is one number.
#pragma once

#include <warploom/storage.hpp>

namespace warploom {

struct DotFp32 {
  using Word = float;
  using Words = Vec;
  static constexpr int kPerWord = 1;
  static constexpr int kBlockRows = 4 * kMicroRows;
  static constexpr bool kInTiles = false;

  static WL_INLINE Vec step(Vec sum, Words a, Words b) { return fma_vec(a, b, sum); }

  // `count` words of one row, along the summed dimension.
  template <class Element>
  static WL_INLINE Words load_along(const Element* row, int count) {
    return load_floats(row, count);
  }

  // Words of `count` columns whose summed dimension runs over kPerWord rows.
  template <class Element>
  static WL_INLINE Words load_across(const Element* const* rows, int column, int count) {
    return load_floats(rows[0] + column, count);
  }

  // The exponential of weights, as exactly as words keep them.
  static WL_INLINE Vec exp2(Vec x) { return exp2_vec(x); }

  // Two vectors along the summed dimension, as words of a left operand.
  static WL_INLINE void store_pair(Word* out, Vec first, Vec second) {
    store_as(out, first);
    store_as(out + kLanes, second);
  }
};

}  // namespace warploom
