// Online softmax of a warp's accumulators, in base 2 (FlashAttention-2, section 3.1).
#pragma once

#include <warploom/device/qualifiers.cuh>
#include <warploom/hooks/linear_bias.cuh>
#include <warploom/hooks/value_scales.cuh>

namespace warploom {

// Beyond it, to base 2, products with the factor are rounded by an eighth and more.
constexpr float kFarLogit = 1048576.0f;

// How many powers of two a row's largest logit may be above its reference before that follows: a
// probability is then at most 256, which 16-bit floats hold as exactly as others, and the output is
// rescaled in few tiles.
constexpr int kLazyMargin = 8;

// Whether a logit is so much larger than the reference that the latter must follow; false if both
// are -inf. Maxima that are told are compared as they are: their products may all be 0.
template <class K>
WL_FN bool outgrows(float logit, float reference, float factor, int margin = kLazyMargin) {
  if constexpr (kTellsMaxScores<K>) return logit > reference;
  return (logit - reference) * factor > float(margin);
}

// Its base has the shifts of the tile at hand: where there are none, it takes no room.
template <class K>
struct Softmax : Shifts<K> {
  static constexpr int kRows = ThreadRows<K>::kCount;
  using Scores = typename WarpMma<K>::Scores;
  using Output = typename WarpMma<K>::Output;

  float factor;          // of logits, to base 2
  float largest[kRows];  // reference that exponents are taken from
  float sum[kRows];      // of this thread's columns only; see finish()

  WL_FN explicit Softmax(float factor_to_base_2) : factor(factor_to_base_2) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      largest[r] = -kInfinity;
      sum[r] = 0.0f;
      // With nothing visible so far every logit is -inf, and any finite reference gives 0.
      reference_[r] = 0.0f;
    }
  }

  // Takes in the maxima of a tile. True if the reference moved in some row of the warp: the
  // output's rows must then be scaled by `rescale`.
  //
  // `largest` follows the true maximum when that is more than 2^kMargin greater. With 0 the largest
  // probability is 1, which 16-bit floats hold exactly: in rows that one key decides, that halves
  // the error. Where maxima are told, `largest` is the maximum. Where weights take scales of
  // values, it is that of scaled weights.
  template <int kMargin, class Scales = NoScales>
  WL_FN bool follow(const Scores& scores, float (&rescale)[kRows], const Scales& scales = {}) {
    float found[kRows];
    bool moved = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto raised = [&](int c) { return scales.raise(c, Fragments<K>::score(scores, r, c)); };
      found[r] = raised(0);
#pragma unroll
      for (int c = 0; c < Fragments<K>::kThreadKeys; c += 2) {
        found[r] = ::fmaxf(found[r], ::fmaxf(raised(c), raised(c + 1)));
      }
      found[r] = this->whole(r, found[r]);
      moved |= exceeds<kMargin>(r, found[r]);
    }
    // Whether any row moves is settled by what each thread has seen itself; few tiles go on.
    if (!__any_sync(kAllLanes, moved)) return false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float largest_of_row = Fragments<K>::row_max(found[r]);
      const bool moves = exceeds<kMargin>(r, largest_of_row);
      rescale[r] = moves ? exp2((largest[r] - largest_of_row) * factor) : 1.0f;
      largest[r] = moves ? largest_of_row : largest[r];
      sum[r] *= rescale[r];
      reference_[r] = moves ? reference_of(largest_of_row) : reference_[r];
    }
    return true;
  }
  // Before probabilities are taken, after the output has been rescaled. A reference is a rounded
  // product, and of 2^27 rounding leaves 8: a power of two that 16-bit probabilities lose, and of
  // more everything. Of such logits differences are taken before the product, which is more
  // instructions for the few rows that have them.
  WL_FN void center(Scores& scores) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!is_far(largest[r])) continue;
      const float shift = this->take_shift(r);
#pragma unroll
      for (int c = 0; c < Fragments<K>::kThreadKeys; ++c) {
        float& score = Fragments<K>::score(scores, r, c);
        score = score + shift - largest[r];
      }
    }
  }
  WL_FN void update(Scores& scores, const ValueScales<K>& scales, Output& output) {
    float rescale[kRows];
    if (follow<0>(scores, rescale, scales)) scale_rows(output, rescale);
    center(scores);
  }

  // Probability of a logit of row r, relative to its reference; counts it in the row's sum.
  WL_FN float probability(int r, float logit) {
    const float p = exp2(this->exponent(r, logit, factor, reference_[r]));
    sum[r] += p;
    return p;
  }

  // Completes the sums; afterwards every thread of a row has them.
  WL_FN void finish() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = Fragments<K>::row_sum(sum[r]);
  }

  WL_FN static void scale_rows(Output& output, const float (&scale)[kRows]) {
    Fragments<K>::scale_rows(output, scale);
  }

 private:
  template <int kMargin>
  WL_FN bool exceeds(int r, float logit) const {
    return outgrows<K>(logit, largest[r], factor, kMargin);
  }
  WL_FN bool is_far(float logit) const {
    return !(abs(logit * factor) <= kFarLogit) && abs(logit) < kInfinity;
  }
  // Infinity is not subtracted: it weighs infinity, and only what is no number makes a sum NaN.
  WL_FN float reference_of(float logit) const {
    return abs(logit * factor) <= kFarLogit ? product_rounded_up(logit, factor) : 0.0f;
  }

  float reference_[kRows];  // largest * factor, rounded up, or 0 while that is infinite or far
};

template <class K>
WL_FN SoftmaxState softmax_state(const Softmax<K>& softmax, int r) {
  return K::Variant::kSoftmax ? SoftmaxState{softmax.largest[r], softmax.sum[r]}
                              : SoftmaxState{0.0f, 1.0f};
}
// Natural log-sum-exp; -inf if nothing was visible, inf if a logit was, 0 without softmax. A sum
// that is no number stays none.
template <class K>
WL_FN float row_lse(const SoftmaxState& state, float factor) {
  if constexpr (!K::Variant::kSoftmax) return 0.0f;
  if (state.sum == 0.0f) return -kInfinity;
  return state.largest * (factor * kLn2) + log2(state.sum) * kLn2;
}
// Writes it where it is wanted. Only kernels that tell maxima call it.
template <class K, class At>
WL_CALLED_FN void write_max_score(Item<K> item, At row, SoftmaxState state) {
  if (item.p.max_scores == nullptr) return;
  item.p.max_scores[item.max_scores_offset(row)] =
      max_score(state.largest, softmax_factor<K>(item.p), state.sum);
}
WL_FN float row_scale(float sum) { return sum == 0.0f ? 0.0f : reciprocal(sum); }

}  // namespace warploom
