// A bias that grows evenly from key to key, as ALiBi's: slope * (kv_pos - origin).
//
// In column j of a tile that is slope * j, and what is the same for all columns. The former an
// element gets by one multiply-add with a constant of the code; the latter is left to the softmax,
// as a shift of the row. A thread counts j from its own first column.
#pragma once

#include <warploom/hooks/logits.cuh>

namespace warploom {

// What the logits of a tile still lack, the same for all that a thread has of a row: nothing.
template <class K, bool kAny = K::Variant::kHasLinearBias>
struct Shifts {
  WL_FN float whole(int /*r*/, float logit) const { return logit; }
  WL_FN static float take_shift(int /*r*/) { return 0.0f; }
  WL_FN float exponent(int /*r*/, float logit, float factor, float reference) const {
    return ::fmaf(logit, factor, -reference);
  }
};

// Or a number. An exponent is rounded down, and its reference up; see product_rounded_up().
template <class K>
struct Shifts<K, true> {
  float of_row[ThreadRows<K>::kCount];

  WL_FN float whole(int r, float logit) const { return logit + of_row[r]; }
  // For who adds it to the logits itself.
  WL_FN float take_shift(int r) {
    const float shift = of_row[r];
    of_row[r] = 0.0f;
    return shift;
  }
  WL_FN float exponent(int r, float logit, float factor, float reference) const {
    return ::fmaf(logit, factor, __fmaf_rd(of_row[r], factor, -reference));
  }
};

template <class K, bool kAny = K::Variant::kHasLinearBias>
class LinearBias {
 public:
  WL_FN LinearBias(const Item<K>& /*item*/, const ThreadRows<K>& /*rows*/) {}
  WL_FN void add(const Item<K>&, const ThreadRows<K>&, const Columns<K>&,
                 typename WarpMma<K>::Scores&, Shifts<K>&) const {}
};

// Made once per work item.
template <class K>
class LinearBias<K, true> {
  using Variant = typename K::Variant;
  using Scores = typename WarpMma<K>::Scores;
  using Rows = ThreadRows<K>;

  // Slopes beyond this, to base 2, are not taken apart, nor what is no number: 2^4 times a column's
  // number is up to 2^11, which float32 rounds by 2^-14.
  static constexpr float kSteepest = 16.0f;

 public:
  WL_FN LinearBias(const Item<K>& item, const Rows& rows) : steep_(0) {
    static_assert(Rows::kCount <= 32, "a bit for each row of a thread");
    const float factor = softmax_factor<K>(item.p);
#pragma unroll
    for (int r = 0; r < Rows::kCount; ++r) {
      if (!(abs(slope(item, rows, r)) * factor <= kSteepest)) steep_ |= 1u << r;
    }
  }

  // Adds the bias to the logits of a tile, all but the shifts.
  WL_FN void add(const Item<K>& item, const Rows& hoisted, const Columns<K>& columns,
                 Scores& scores, Shifts<K>& shifts) const {
    const Rows rows = Sizes<K>::kRowBlocks > 1 ? Rows(item) : hoisted;
    const int first = columns.kv_pos(Fragments<K>::first_key());
#pragma unroll
    for (int r = 0; r < Rows::kCount; ++r) {
      // Each row by its own slope: which rows a thread has beside it must not change its bits.
      if (steep_ >> r & 1) {
        shifts.of_row[r] = 0.0f;
        change_row(scores, r, [&](int j, float score) {
          // What is hidden stays so, whatever the bias is.
          return score == -kInfinity ? score : score + value(item, rows, r, first + j);
        });
      } else {
        shifts.of_row[r] = value(item, rows, r, first);
        const float slope_of_row = slope(item, rows, r);
        change_row(scores, r, [&](int j, float score) {
          return j == 0 ? score : ::fmaf(slope_of_row, float(j), score);
        });
      }
    }
  }

 private:
  WL_FN static float slope(const Item<K>& item, const Rows& rows, int r) {
    const Row<K>& at = item.row(Rows::row(r));
    return Variant::slope(item.p, item.tile(), rows.tile(r), at, rows.state[r]);
  }
  WL_FN static float value(const Item<K>& item, const Rows& rows, int r, int kv_pos) {
    const Row<K>& at = item.row(Rows::row(r));
    return Variant::linear_bias(item.p, item.tile(), rows.tile(r), at, rows.state[r], kv_pos);
  }
  // Replaces each score of a row by change(its column, counted from this thread's first, score).
  template <class Change>
  WL_FN static void change_row(Scores& scores, int r, const Change& change) {
#pragma unroll
    for (int c = 0; c < Fragments<K>::kThreadKeys; ++c) {
      float& score = Fragments<K>::score(scores, r, c);
      score = change(Fragments<K>::key_step(c), score);
    }
  }

  unsigned steep_;  // a bit for each row of the thread
};

}  // namespace warploom
