// Scales of values that weights are multiplied with instead: Operands::kScalesWeights.
//
// A weight times a scale is rounded to 16 bits, and what one key decides would be rounded twice. So
// a row's reference is taken from its logits plus the logarithms of the scales: the largest product
// is then 1, as exactly as float32 has its logit, and the sum of the weights is what the output is
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
  WL_FN explicit ValueScales(const Item<K>& /*item*/) {}
  WL_FN static void read_ahead(const Item<K>& /*item*/, const Columns<K>& /*columns*/) {}
  WL_FN static void read(const Item<K>& /*item*/, const Columns<K>& /*columns*/) {}
};

// Of the keys that a thread has in a tile.
template <class K>
class ValueScales<K, true> {
  using F = Fragments<K>;
  // Logarithms beyond it count as this much. Two references of equal logits are then at most 2^96
  // apart, and what moves a sum from one to the other is flushed at 2^-126: 2^-30 of it may go.
  static constexpr float kMost = 48.0f;
  static constexpr float kLeastFactor = 1e-30f;  // with less, kMost powers would be infinite
  static constexpr bool kAhead = Sizes<K>::kSplitKeys;

 public:
  WL_FN explicit ValueScales(const Item<K>& item)
      : per_power_(reciprocal(::fmaxf(softmax_factor<K>(item.p), kLeastFactor))) {}

  // Before the tile's keys have come.
  WL_FN void read_ahead(const Item<K>& item, const Columns<K>& columns) {
    if constexpr (kAhead) {
      of_lanes_.read([&](int key) { return scale_of(item, columns, key); });
    }
  }
  // Before any of them is asked for.
  WL_FN void read(const Item<K>& item, const Columns<K>& columns) {
#pragma unroll
    for (int c = 0; c < F::kThreadKeys; ++c) {
      if constexpr (kAhead) {
        scales_[c] = of_lanes_.of(c);
      } else {
        scales_[c] = scale_of(item, columns, F::first_key() + F::key_step(c));
      }
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
  WL_FN static float scale_of(const Item<K>& item, const Columns<K>& columns, int key) {
    const float scale =
        K::Variant::value_scale(item.p, item.tile(), columns.kv_pos(key), K::Config::kHeadDimV);
    return columns.exists(key) ? scale : 0.0f;  // 0 * NaN is not 0
  }

  struct None {};
  cute::conditional_t<kAhead, LaneKeys<K, float>, None> of_lanes_;
  float scales_[F::kThreadKeys];
  float per_power_;  // what a power of two is among logits
};

}  // namespace warploom
