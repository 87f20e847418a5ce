// The two products of attention for a tile of 8 rows: keys, and lanes of values, are the left
// operand, and rows the right one. With rows on the left, half of each product would be empty.
#pragma once

#include <warploom/compute/mma.cuh>

namespace warploom {

template <class K>
struct WarpMma<K, true> {
  using S = Sizes<K>;
  using O = Operands<K>;
  using T = StagedOperands<K>;
  using F = Fragments<K>;
  using Element = typename K::Config::Element;
  using Scores = typename F::Scores;
  using Output = typename F::Output;
  static constexpr int kSums = 2;

  // All warps have the same rows: each keeps them in registers, two for 16 lanes.
  class Queries {
   public:
    WL_FN explicit Queries(const Element* staged) {
      load(staged);
      if constexpr (T::kHalfKeys) {
        int largest = 0;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) largest = larger_bits(largest, held_[i]);
        const HalfScale scale(largest);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) held_[i] = to_half(held_[i], scale.scale);
        // The thread loaded row l / 4, and its logits are of other rows.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          unscale_[r] = __shfl_sync(kAllLanes, scale.inverse, F::row(r) * 4);
        }
      }
    }
    // Of lanes k .. k + 15: the first eight, or the others.
    WL_FN unsigned half(int k, int i) const { return held_[k / 8 + i]; }
    WL_FN void rescale(Scores& scores) const {
#pragma unroll
      for (int m = 0; T::kHalfKeys && m < S::kStagingKeys / 16; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[0][m][i] *= unscale_[i % 2];
      }
    }

   private:
    static constexpr int kHeld = S::kDimQk / 8;

    WL_FN void load(const Element* staged) {
      if constexpr (O::kNarrowKeys) {
        const typename T::QueryReader reader(staged, F::lane() / 4, F::lane() % 4 * 4);
#pragma unroll
        for (int k = 0; k < S::kDimQk; k += 16) {
          const uint2 both = reader.template block<uint2>(0, k);
          held_[k / 8] = both.x, held_[k / 8 + 1] = both.y;
        }
      } else {
        const typename T::QueryReader reader(staged, F::lane() % 8, F::lane() / 8 * kVector);
#pragma unroll
        for (int k = 0; k < kHeld; k += 4) {
          cute::SM75_U32x4_LDSM_N::copy(reader.block(0, 8 * k), held_[k], held_[k + 1],
                                        held_[k + 2], held_[k + 3]);
        }
      }
    }

    unsigned held_[kHeld];
    float unscale_[2];  // of this thread's rows
  };

  // scores = K Q^T. A product waits for the one before it of the same sum: there are two sums, of
  // every other step of lanes.
  WL_FN static void scores(const Queries& queries, const typename T::Keys& keys, Scores& scores) {
    constexpr int kSteps = O::kNarrowKeys ? 2 : 1;  // of 16 lanes, with one ldmatrix of keys
    Scores sums[kSums] = {};
#pragma unroll
    for (int k = 0; k < S::kDimQk; k += 16 * kSteps) {
#pragma unroll
      for (int m = 0; m < S::kStagingKeys / 16; ++m) {
        unsigned a[kSteps][4];
        T::read_keys(keys, 2 * m, k, a);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          T::template multiply<typename T::ScoreAtom>(sums[(k / 16 + s) % kSums][0][m], a[s],
                                                      queries.half(k + 16 * s, 0),
                                                      queries.half(k + 16 * s, 1));
        }
      }
    }
#pragma unroll
    for (int m = 0; m < S::kStagingKeys / 16; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[0][m][i] = sums[0][0][m][i];
        if constexpr (kSums > 1) scores[0][m][i] += sums[1][0][m][i];
      }
    }
  }

  // output += V^T P^T, as WarpMma::accumulate. Weights of 8 keys by 8 rows are transposed among the
  // threads of the warp.
  template <class P>
  WL_FN static void accumulate(const Scores& logits, const typename T::Values& values, P&& weight,
                               Output& output) {
    constexpr int kSteps = O::kNarrowValues ? 2 : 1;  // of 16 lanes, with one ldmatrix
#pragma unroll
    for (int m = 0; m < S::kStagingKeys / 16; ++m) {
      unsigned b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = 2 * m + i;
        const float low = weight(0, c, F::score(logits, 0, c));
        const float high = weight(1, c, F::score(logits, 1, c));
        b[i] = transpose(pack(typename T::ValueElement{}, low, high));
      }
#pragma unroll
      for (int l = 0; l < S::kDimV / 16; l += kSteps) {
        unsigned a[kSteps][4];
        T::read_values(values, 2 * m, 2 * l, a);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          T::template multiply<typename T::ValueAtom>(output[0][l + s], a[s], b[0], b[1]);
        }
      }
    }
  }

  // Which lane of the output the thread's accumulators of the first and of the last eight lanes of
  // a block of 16 hold; see StagedOperands for 8-bit values.
  WL_FN static int output_lane(int half) {
    return O::kNarrowValues ? F::lane() / 4 * 2 + half : F::lane() / 4 + half * 8;
  }
};

}  // namespace warploom
