// The largest score of each row, in kernels that are built to return it: their Params have a member
// for it (codegen/abi.py). Included after qualifiers.cuh or qualifiers.hpp.
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

// A row's largest score in natural units, -inf if no key was visible. `largest` is the row's
// largest logit, `factor` converts it to base 2, and `sum` is the sum of the row's probabilities.
// Maxima ignore NaN, but the sum is then NaN, even beside infinity.
WL_FN float max_score(float largest, float factor, float sum) {
  if (sum != sum) return sum;
  return largest * (factor * kLn2);
}

}  // namespace warploom
