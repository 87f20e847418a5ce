// The largest score of each row, in kernels that are made to tell it: their Params have a place for
// it (codegen/abi.py).
// Included after qualifiers.cuh or qualifiers.hpp.
#pragma once

namespace warploom {

template <class Params, class = void>
struct MaxScores {
  static constexpr bool kTold = false;
};
template <class Params>
struct MaxScores<Params, decltype(void(&Params::max_scores))> {
  static constexpr bool kTold = true;
};
template <class K>
constexpr bool kTellsMaxScores = MaxScores<typename K::Params>::kTold;

// In natural units, -inf if nothing was visible, from a row's largest logit, the factor that brings
// it to base 2, and the sum of its probabilities. Maxima pass over what is no number, but sums keep
// it, even beside infinity.
WL_FN float max_score(float largest, float factor, float sum) {
  if (sum != sum) return sum;
  return largest * (factor * kLn2);
}

}  // namespace warploom
