// Which rows and keys of a tile a thread has in its warp's accumulators, and where.
//
// An accumulator block c[4] of 16 x 8 numbers holds, in lane l, its rows l / 4 (c[0], c[1]) and
// l / 4 + 8 (c[2], c[3]) at columns 2 * (l % 4) and the next.
#pragma once

#include <warploom/staging/tile.cuh>

namespace warploom {

// Logits of 16 rows by 8 keys, outputs of 16 rows by 8 lanes.
template <class K, bool kTurned = Sizes<K>::kTurned>
struct Fragments {
  using S = Sizes<K>;
  static constexpr int kThreadRows = 2 * S::kRowBlocks, kThreadKeys = 2 * S::kKeyBlocks;
  using Scores = float[S::kRowBlocks][S::kKeyBlocks][4];
  using Output = float[S::kRowBlocks][S::kDimV / 8][4];

  WL_FN static unsigned lane() { return threadIdx.x % kWarpSize; }
  // First row of the warp's block b.
  WL_FN static int block_row(int b) {
    const unsigned warp = S::kSplitKeys ? 0 : threadIdx.x / kWarpSize;
    return 16 * (warp + S::kRowWarps * b);
  }
  // Row of the tile that is this thread's r-th.
  WL_FN static int row(int r) { return block_row(r / 2) + lane() / 4 + r % 2 * 8; }
  // Its c-th key lies so far behind its first one.
  WL_FN static constexpr int first_key(unsigned lane) { return lane % 4 * 2; }
  WL_FN static int first_key() { return first_key(lane()); }
  WL_FN static constexpr int key_step(int c) { return c / 2 * 8 + c % 2; }
  // How many of its keys have a step below `end`.
  WL_FN static int keys_before(int end) {
    const int within = max(0, min(end, key_step(kThreadKeys)));
    return within / 8 * 2 + min(within % 8, 2);
  }
  WL_FN static float& score(Scores& scores, int r, int c) {
    return scores[r / 2][c / 2][r % 2 * 2 + c % 2];
  }
  WL_FN static const float& score(const Scores& scores, int r, int c) {
    return scores[r / 2][c / 2][r % 2 * 2 + c % 2];
  }
  // One of the threads that share rows.
  WL_FN static bool is_first_of_rows() { return lane() % 4 == 0; }

  // Reductions over the threads that hold a row.
  WL_FN static float row_max(float x) {
    x = ::fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
    return ::fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
  }
  WL_FN static float row_sum(float x) {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
  }

  WL_FN static void scale_rows(Output& output, const float (&scale)[kThreadRows]) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
      for (int l = 0; l < S::kDimV / 8; ++l) {
        output[r / 2][l][r % 2 * 2] *= scale[r];
        output[r / 2][l][r % 2 * 2 + 1] *= scale[r];
      }
    }
  }
};

// A tile of 8 rows: logits of 16 keys by 8 rows, outputs of 16 lanes by 8 rows, so that no product
// has rows that are empty.
template <class K>
struct Fragments<K, true> {
  using S = Sizes<K>;
  static constexpr int kThreadRows = 2, kThreadKeys = S::kStagingKeys / 8;
  using Scores = float[1][S::kStagingKeys / 16][4];
  using Output = float[1][S::kDimV / 16][4];

  WL_FN static unsigned lane() { return threadIdx.x % kWarpSize; }
  WL_FN static int row(int r) { return lane() % 4 * 2 + r; }
  WL_FN static constexpr int first_key(unsigned lane) { return lane / 4; }
  WL_FN static int first_key() { return first_key(lane()); }
  WL_FN static constexpr int key_step(int c) { return c * 8; }
  WL_FN static int keys_before(int end) {
    return (max(0, min(end, key_step(kThreadKeys))) + 7) / 8;
  }
  WL_FN static float& score(Scores& scores, int r, int c) {
    return scores[0][c / 2][c % 2 * 2 + r];
  }
  WL_FN static const float& score(const Scores& scores, int r, int c) {
    return scores[0][c / 2][c % 2 * 2 + r];
  }
  WL_FN static bool is_first_of_rows() { return lane() < 4; }

  WL_FN static float row_max(float x) {
    x = ::fmaxf(x, __shfl_xor_sync(kAllLanes, x, 4));
    x = ::fmaxf(x, __shfl_xor_sync(kAllLanes, x, 8));
    return ::fmaxf(x, __shfl_xor_sync(kAllLanes, x, 16));
  }
  WL_FN static float row_sum(float x) {
    x += __shfl_xor_sync(kAllLanes, x, 4);
    x += __shfl_xor_sync(kAllLanes, x, 8);
    return x + __shfl_xor_sync(kAllLanes, x, 16);
  }

  WL_FN static void scale_rows(Output& output, const float (&scale)[kThreadRows]) {
#pragma unroll
    for (int l = 0; l < S::kDimV / 16; ++l) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[0][l][i] *= scale[i % 2];
    }
  }
};

}  // namespace warploom
