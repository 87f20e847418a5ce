// Scales of values that weights are multiplied with instead: Operands::kScalesWeights.
//
// A weight times a scale is rounded to 16 bits, and what one key decides would be rounded twice. So
// a row's reference is taken from its logits plus the logarithms of the scales: the largest product
// is then 1, exactly, whatever its scale is, and the sum of the weights becomes what the output is
// divided by.
#pragma once

#include <warploom/hooks/logits.cuh>

namespace warploom {

// A weight is a probability.
struct NoScales {
  WL_FN static float apply(int /*c*/, float weight) { return weight; }
  WL_FN static float raise(int /*c*/, float logit) { return logit; }
};
template <class K, bool kAny = Operands<K>::kScalesWeights>
struct ValueScales : NoScales {
  WL_FN ValueScales(const Item<K>& /*item*/, const Columns<K>& /*columns*/) {}
};

// Of the keys that a thread has in a tile.
template <class K>
class ValueScales<K, true> {
  using F = Fragments<K>;
  // Logarithms beyond it count as this much: float32 holds 2^64 of whatever number of weights.
  static constexpr float kMost = 64.0f;

 public:
  WL_FN ValueScales(const Item<K>& item, const Columns<K>& columns)
      : per_power_(reciprocal(::fmaxf(softmax_factor<K>(item.p), 1e-30f))) {
#pragma unroll
    for (int c = 0; c < F::kThreadKeys; ++c) {
      const int key = F::first_key() + F::key_step(c);
      const float scale =
          K::Variant::value_scale(item.p, item.tile(), columns.kv_pos(key), K::Config::kHeadDimV);
      scales_[c] = columns.exists(key) ? scale : 0.0f;  // 0 * NaN is not 0
    }
  }

  // The weight of key c, from its probability.
  WL_FN float apply(int c, float weight) const { return weight * scales_[c]; }
  // What the reference of a row is taken from, in place of a logit of key c.
  WL_FN float raise(int c, float logit) const {
    const float power = ::fminf(::fmaxf(log2(abs(scales_[c])), -kMost), kMost);
    return ::fmaf(power, per_power_, logit);
  }

 private:
  float scales_[F::kThreadKeys];
  float per_power_;  // what a power of two is among logits
};

}  // namespace warploom
