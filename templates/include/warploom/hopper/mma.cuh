// The two products of attention for one consumer group of 128 threads: WGMMA with operands in the
// staged tiles' own swizzled layout, and probabilities from registers.
//
// A group's accumulators are laid out as a warp's in mma.cuh: warp w of the CTA has rows 16 w .. 16
// w + 15.
#pragma once

#include <warploom/compute/mma.cuh>
#include <warploom/hopper/shared.cuh>
#include <warploom/hopper/wgmma.cuh>

namespace warploom::hopper {

template <class K>
class WarpgroupMma {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Queries = StagedOperand<QueryTile<K>>;
  using Keys = StagedOperand<typename Shared<K>::WideKeys>;
  using Values = StagedOperand<typename Shared<K>::WideValues>;
  using ScoresWgmma = Wgmma<typename C::Element, C::kKeys>;
  using OutputWgmma = Wgmma<ValueElement<K>, S::kDimV>;

 public:
  using Scores = typename WarpMma<K>::Scores;
  using Output = typename WarpMma<K>::Output;
  // Probabilities as the left operand: for each 16 keys four registers, each of two numbers.
  using Probabilities = unsigned[C::kKeys / 16][4];

  WL_FN WarpgroupMma(Shared<K> shared, int group) : shared_(shared), warpgroup_(group) {}

  // Starts scores = Q K^T.
  WL_FN void start_scores(int query_stage, int stage, Scores& scores) const {
    const auto queries =
        Queries::by_rows(shared_.queries(0))
            .moved(query_stage * Queries::kVectors + warpgroup_ * Queries::rows(64));
    const auto keys = Keys::by_rows(shared_.keys(0)).moved(stage * Keys::kVectors);
    fence(scores[0]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < S::kDimQk / 16; ++k) {
      ScoresWgmma::from_staged(queries.moved(Queries::columns(16 * k)),
                               keys.moved(Keys::columns(16 * k)), &scores[0][0][0], k > 0);
    }
    cute::warpgroup_commit_batch();
    fence(scores[0]);
  }

  // Starts output += P V, or output = P V.
  WL_FN void start_output(Probabilities& probabilities, int stage, bool is_first,
                          Output& output) const {
    const auto values = Values::by_columns(shared_.values(0)).moved(stage * Values::kVectors);
    fence(probabilities);
    fence(output[0]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k) {
      OutputWgmma::from_registers(probabilities[k], values.moved(Values::rows(16 * k)),
                                  &output[0][0][0], k > 0 || !is_first);
    }
    cute::warpgroup_commit_batch();
    fence(output[0]);
  }

  // Waits until at most kPending of the products started last still run.
  template <int kPending>
  WL_FN static void wait() {
    cute::warpgroup_wait<kPending>();
  }

  WL_FN static void pack(const Scores& scores, Probabilities& probabilities) {
#pragma unroll
    for (int n = 0; n < C::kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        probabilities[n / 2][n % 2 * 2 + i] =
            warploom::pack(ValueElement<K>{}, scores[0][n][2 * i], scores[0][n][2 * i + 1]);
      }
    }
  }

  // Keeps the compiler from moving registers into or out of running products.
  template <class Register, int kN>
  WL_FN static void fence(Register (&registers)[kN][4]) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) cute::warpgroup_fence_operand(registers[n][i]);
    }
  }

 private:
  Shared<K> shared_;
  int warpgroup_;
};

}  // namespace warploom::hopper
