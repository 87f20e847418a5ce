// Online softmax in base 2 of one row and one tile of keys (FlashAttention-2, algorithm 1).
#pragma once

#include <warploom/compute/logits.hpp>

namespace warploom {

// Of one row: the maximum before scaling, the same in every lane, and the sum spread over lanes.
// Keeping vectors saves a reduction per tile.
struct Running {
  Vec max = broadcast(-kInfinity);
  Vec sum = {};
};

// A row that has seen nothing keeps sum 0: any finite base makes its -inf logits weigh 0.
WL_INLINE Vec finite_base(Vec max) { return max == -kInfinity ? Vec{} : max; }

// Beyond it, to base 2, products with the scale are rounded by an eighth and more.
constexpr float kFarLogit = 1048576.0f;

// Words of the probabilities of logits [begin, end), relative to `base`, and their sum. Of far
// logits differences are taken first: what rounding leaves of their products is a power of two that
// 16 bits, or even 32, lose.
template <class Dot, bool kFar, class Meanwhile>
WL_INLINE Vec exponentiate(const float* s, int begin, int end, float scale, float base,
                           typename Dot::Word* out, Meanwhile meanwhile) {
  const Vec product = broadcast(kFar ? 0.0f : product_rounded_up(base, scale));
  const auto exponent = [&](int j) WL_LAMBDA_INLINE {
    return kFar ? (load_vec(s + j) - base) * scale
                : fma_vec(load_vec(s + j), broadcast(scale), -product);
  };
  Vec sum[2] = {};
  for (int j = begin; j < end; j += 2 * kLanes) {
    const Vec first = Dot::exp2(exponent(j)), second = Dot::exp2(exponent(j + kLanes));
    meanwhile();
    sum[0] += first;
    sum[1] += second;
    Dot::store_pair(out + j / Dot::kPerWord, first, second);
  }
  return sum[0] + sum[1];
}

// The same of a row whose maximum is infinite: infinity weighs infinity, what is no number stays
// none, and all else, earlier sums too, weighs nothing.
template <class Dot, class Meanwhile>
float softmax_infinite_row(const float* s, int begin, int end, typename Dot::Word* out,
                           Running& running, Meanwhile meanwhile) {
  const Vec infinity = broadcast(kInfinity);
  const auto weight = [&](int j) WL_LAMBDA_INLINE {
    const Vec logits = load_vec(s + j);
    return logits < infinity ? Vec{} : logits;
  };
  const float rescale = running.max[0] == kInfinity ? 1.0f : 0.0f;
  running = {infinity, running.sum * rescale};
  for (int j = begin; j < end; j += 2 * kLanes) {
    const Vec first = weight(j), second = weight(j + kLanes);
    meanwhile();
    running.sum += first + second;
    Dot::store_pair(out + j / Dot::kPerWord, first, second);
  }
  return rescale;
}

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
  const float base = finite_base(max)[0];
  if (base == kInfinity) {
    return softmax_infinite_row<Dot>(s, begin, end, out, running, meanwhile);
  }
  // Exactly 1 if the maximum stays: what rounding adds here would grow with every tile.
  const Vec rescale = exp2_vec((running.max - base) * scale);
  const bool is_far = !(__builtin_fabsf(base * scale) <= kFarLogit);
  const Vec sum = is_far ? exponentiate<Dot, true>(s, begin, end, scale, base, out, meanwhile)
                         : exponentiate<Dot, false>(s, begin, end, scale, base, out, meanwhile);
  running = {max, fma_vec(running.sum, rescale, sum)};
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
