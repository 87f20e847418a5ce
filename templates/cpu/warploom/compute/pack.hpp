// Right operands of the two products, packed in panels from rows that may lie anywhere.
#pragma once

#include <warploom/compute/matmul.hpp>
#include <warploom/compute/transpose.hpp>

namespace warploom {

// Rows [begin, end) from a column on, to the cache: they may lie anywhere, so that a processor does
// not foresee what is packed next.
template <class Element>
WL_INLINE void prefetch_rows(const Element* const* rows, int begin, int end, int column) {
  for (int i = begin; i < end; ++i) __builtin_prefetch(rows[i] + column);
}

// K^T: columns are keys, the summed dimension is the head. Rows [0, count) are read, count being a
// multiple of kLanes; panels lie ceil(dim / kPerWord) * kPanel words apart.
template <class Dot, int kDim, class Element>
void pack_transposed(const Element* const* rows, int count, typename Dot::Word* out) {
  constexpr int kSteps = kDim / Dot::kPerWord;
  constexpr int kWhole = kSteps / kLanes * kLanes;
  auto block = [&](int key, int step, int steps) WL_LAMBDA_INLINE {
    if (key + kLanes < count) {  // another block of kLanes rows
      prefetch_rows(rows, key + kLanes, key + 2 * kLanes, step * Dot::kPerWord);
    }
    typename Dot::Words words[kLanes];
    WL_UNROLL for (int i = 0; i < kLanes; ++i) {
      words[i] = Dot::load_along(rows[key + i] + step * Dot::kPerWord, steps);
    }
    transpose(words);
    auto* panel = out + key / kPanel * kSteps * kPanel + step * kPanel + key % kPanel;
    WL_UNROLL for (int i = 0; i < steps; ++i) store_as(panel + i * kPanel, words[i]);
  };
  for (int key = 0; key < count; key += kLanes) {
    for (int step = 0; step < kWhole; step += kLanes) block(key, step, kLanes);
    if constexpr (kWhole < kSteps) block(key, kWhole, kSteps - kWhole);
  }
}

// V: columns are the head, the summed dimension is keys. Rows [0, count) are read, count being a
// multiple of kPerWord; panels lie `panel_stride` words apart.
template <class Dot, int kDim, class Element>
void pack_rows(const Element* const* rows, int count, typename Dot::Word* out, int panel_stride) {
  constexpr int kWhole = kDim / kLanes * kLanes;
  auto block = [&](int key, int column, int columns) WL_LAMBDA_INLINE {
    const int ahead = min_int(key + kLanes, count - Dot::kPerWord);
    prefetch_rows(rows, ahead, ahead + Dot::kPerWord, column);
    const int step = key / Dot::kPerWord;
    auto* panel = out + column / kPanel * panel_stride + step * kPanel + column % kPanel;
    store_as(panel, Dot::load_across(rows + key, column, columns));
  };
  for (int key = 0; key < count; key += Dot::kPerWord) {
    for (int column = 0; column < kWhole; column += kLanes) block(key, column, kLanes);
    if constexpr (kWhole < kDim) block(key, kWhole, kDim - kWhole);
  }
}

// Rows back from one panel of kDim words each: out is [count][stride].
template <int kDim>
void unpack_panel(const float* panel, int count, float* out, int stride) {
  for (int row = 0; row < count; row += kLanes) {
    for (int lane = 0; lane < kDim; lane += kLanes) {
      const int lanes = min_int(kLanes, kDim - lane);
      Vec words[kLanes] = {};
      for (int i = 0; i < lanes; ++i) words[i] = load_vec(panel + (lane + i) * kPanel + row);
      transpose(words);
      const int rows = min_int(kLanes, count - row);
      for (int i = 0; i < rows; ++i) {
        std::memcpy(out + (row + i) * stride + lane, &words[i], sizeof(float) * lanes);
      }
    }
  }
}

}  // namespace warploom
