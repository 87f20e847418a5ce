// A square of 32-bit words turned in registers: log2(n) rounds of perfect shuffles (Stone, 1971).
#pragma once

#include <warploom/compute/simd.hpp>

namespace warploom {

// Indices a[start], b[start], a[start + 1], b[start + 1], ...
template <int kStart, int... kIndex>
constexpr auto interleaved(std::integer_sequence<int, kIndex...>) {
  return std::integer_sequence<int, (kStart + kIndex / 2 + (kIndex % 2) * kLanes)...>{};
}

template <class Words>
WL_INLINE void transpose(Words (&rows)[kLanes]) {
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>{};
  constexpr auto kLow = decltype(interleaved<0>(kAll)){};
  constexpr auto kHigh = decltype(interleaved<kLanes / 2>(kAll)){};
  WL_UNROLL for (int round = 1; round < kLanes; round *= 2) {
    Words next[kLanes];
    WL_UNROLL for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = shuffle(rows[i], rows[i + kLanes / 2], kLow);
      next[2 * i + 1] = shuffle(rows[i], rows[i + kLanes / 2], kHigh);
    }
    WL_UNROLL for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

}  // namespace warploom
