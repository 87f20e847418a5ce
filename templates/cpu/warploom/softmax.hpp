// Online softmax in base 2 of one row and one tile of keys (FlashAttention-2, algorithm 1).
#pragma once

#include <warploom/logits.hpp>

namespace warploom {

// Of one row: the maximum before scaling, the same in every lane, and the sum spread over lanes.
// Keeping vectors saves a reduction per tile.
struct Running {
  Vec max = broadcast(-kInfinity);
  Vec sum = {};
};

// A row that has seen nothing keeps sum 0: any finite base makes its -inf logits weigh 0.
WL_INLINE Vec finite_base(Vec max) { return max == -kInfinity ? Vec{} : max; }

// Turns logits [begin, end), which `scale` > 0 brings to base 2, into words of probabilities
// relative to the new maximum; returns the factor that brings earlier sums to it. begin and end are
// multiples of 2 * kLanes; `meanwhile` is called for each.
template <class Dot, class Meanwhile>
WL_INLINE float softmax_row(const float* s, int begin, int end, float scale,
                            typename Dot::Word* out, Running& running, Meanwhile meanwhile) {
  Vec top[2] = {running.max, running.max};
  for (int j = begin; j < end; j += 2 * kLanes) {
    top[0] = max_vec(top[0], load_vec(s + j));
    top[1] = max_vec(top[1], load_vec(s + j + kLanes));
  }
  const Vec max = max_lanes(max_vec(top[0], top[1]));
  const Vec base = Vec{} + product_rounded_up(finite_base(max)[0], scale);
  // Exactly 1 if the maximum stays: what rounding adds here would grow with every tile.
  const Vec rescale = exp2_vec((running.max - finite_base(max)) * scale);
  Vec sum[2] = {running.sum * rescale, Vec{}};
  for (int j = begin; j < end; j += 2 * kLanes) {
    const Vec first = Dot::exp2(load_vec(s + j) * scale - base);
    const Vec second = Dot::exp2(load_vec(s + j + kLanes) * scale - base);
    meanwhile();
    sum[0] += first;
    sum[1] += second;
    Dot::store_pair(out + j / Dot::kPerWord, first, second);
  }
  running = {max, sum[0] + sum[1]};
  return rescale[0];
}

// Without softmax the logits are the weights.
template <class Dot>
WL_INLINE void copy_row(const float* s, int begin, int end, typename Dot::Word* out) {
  for (int j = begin; j < end; j += 2 * kLanes) {
    Dot::store_pair(out + j / Dot::kPerWord, load_vec(s + j), load_vec(s + j + kLanes));
  }
}

}  // namespace warploom
