// The two products of attention on tensor cores, for one warp: 16x8x16 MMA with fp32 accumulation.
// Rows are the left operand; see turned_mma.cuh for tiles of 8 rows, which are the right one.
#pragma once

#include <warploom/compute/staged_operands.cuh>

namespace warploom {

template <class K, bool kTurned = Sizes<K>::kTurned>
struct WarpMma {
  using S = Sizes<K>;
  using O = Operands<K>;
  using T = StagedOperands<K>;
  using F = Fragments<K>;
  using Element = typename K::Config::Element;

  static constexpr int kRowBlocks = S::kRowBlocks;
  static constexpr int kKeyBlocks = S::kKeyBlocks;
  static constexpr int kLaneBlocks = S::kDimV / 8;

  using Scores = typename Fragments<K>::Scores;
  using Output = typename Fragments<K>::Output;

  // First column of the output that this thread holds: its own of a block of 8, or of two blocks.
  WL_FN static int first_column() { return F::lane() % 4 * (O::kNarrowValues ? 4 : 2); }

  // The rows of queries of a warp, read from shared memory for each tile of keys. Few rows of
  // bfloat16 that meet 8-bit keys become half precision, and stay in registers: these keys widen to
  // it for a quarter of the instructions. A power of two for each row keeps all that bfloat16
  // holds, down to 2^-31 of the row's largest number.
  class Queries {
   public:
    WL_FN explicit Queries(const Element* staged) : reader_(reader(staged)) {
      if constexpr (T::kHalfKeys) hold();
    }
    // 16 lanes of block m.
    WL_FN void read(int m, int k, unsigned (&a)[4]) const {
      if constexpr (T::kHalfKeys) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = held_[k / 16][i];
      } else {
        load(m, k, a);
      }
    }
    WL_FN void rescale(Scores& scores) const {
#pragma unroll
      for (int n = 0; T::kHalfKeys && n < kKeyBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[0][n][i] *= unscale_[i / 2];
      }
    }

   private:
    WL_FN static typename T::QueryReader reader(const Element* staged) {
      if constexpr (O::kNarrowKeys)
        return {staged, F::block_row(0) + F::lane() / 4, F::lane() % 4 * 4};
      return {staged, F::block_row(0) + F::lane() % 16, F::lane() / 16 * kVector};
    }
    WL_FN void load(int m, int k, unsigned (&a)[4]) const {
      const int row = 16 * S::kRowWarps * m;
      if constexpr (O::kNarrowKeys) {
        const uint2 low = reader_.template block<uint2>(row, k);
        const uint2 high = reader_.template block<uint2>(row + 8, k);
        a[0] = low.x, a[1] = high.x, a[2] = low.y, a[3] = high.y;
      } else {
        cute::SM75_U32x4_LDSM_N::copy(reader_.block(row, k), a[0], a[1], a[2], a[3]);
      }
    }
    WL_FN void hold() {
      int largest[2] = {};
#pragma unroll
      for (int k = 0; k < S::kDimQk; k += 16) {
        load(0, k, held_[k / 16]);
#pragma unroll
        for (int i = 0; i < 4; ++i) largest[i % 2] = larger_bits(largest[i % 2], held_[k / 16][i]);
      }
      const HalfScale scales[2] = {HalfScale(largest[0]), HalfScale(largest[1])};
#pragma unroll
      for (int r = 0; r < 2; ++r) unscale_[r] = scales[r].inverse;
#pragma unroll
      for (int k = 0; k < S::kDimQk / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) held_[k][i] = to_half(held_[k][i], scales[i % 2].scale);
      }
    }

    typename T::QueryReader reader_;
    unsigned held_[T::kHalfKeys ? S::kDimQk / 16 : 1][4];
    float unscale_[2];  // of rows l / 4 and l / 4 + 8
  };

  // scores = Q K^T
  WL_FN static void scores(const Queries& queries, const typename T::Keys& keys, Scores& scores) {
    constexpr int kSteps = O::kNarrowKeys ? 2 : 1;  // of 16 lanes, with one ldmatrix of keys
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < S::kDimQk; k += 16 * kSteps) {
      unsigned a[kSteps][kRowBlocks][4];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) queries.read(m, k + 16 * s, a[s][m]);
      }
#pragma unroll
      for (int n = 0; n < kKeyBlocks; n += 2) {
        unsigned b[kSteps][4];
        T::read_keys(keys, n, k, b);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int m = 0; m < kRowBlocks; ++m) {
            T::template multiply<typename T::ScoreAtom>(scores[m][n], a[s][m], b[s][0], b[s][1]);
            T::template multiply<typename T::ScoreAtom>(scores[m][n + 1], a[s][m], b[s][2],
                                                        b[s][3]);
          }
        }
      }
    }
  }

  // output += P V, where P is weight(r, c, logit) of this thread's row r and key c. Two
  // neighbouring 8-column blocks in accumulator layout, rounded to 16 bits, are the left operand of
  // one step of 16 keys. Weights are worked out step by step: registers of their logits become
  // free, and exponentials overlap with the products of the step before.
  template <class P>
  WL_FN static void accumulate(const Scores& logits, const typename T::Values& values, P&& weight,
                               Output& output) {
    constexpr int kSteps = O::kNarrowValues ? 2 : 1;  // of 16 columns, with one ldmatrix
#pragma unroll
    for (int n = 0; n < kKeyBlocks; n += 2) {
      unsigned a[kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = 2 * m + i % 2, c = 2 * (n + i / 2);
          const float low = weight(r, c, F::score(logits, r, c));
          const float high = weight(r, c + 1, F::score(logits, r, c + 1));
          a[m][i] = pack(typename T::ValueElement{}, low, high);
        }
      }
#pragma unroll
      for (int l = 0; l < kLaneBlocks; l += 2 * kSteps) {
        unsigned b[kSteps][4];
        T::read_values(values, n, l, b);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int m = 0; m < kRowBlocks; ++m) {
            T::template multiply<typename T::ValueAtom>(output[m][l + 2 * s], a[m], b[s][0],
                                                        b[s][1]);
            T::template multiply<typename T::ValueAtom>(output[m][l + 2 * s + 1], a[m], b[s][2],
                                                        b[s][3]);
          }
        }
      }
    }
  }
};

}  // namespace warploom
