// Writes a consumer's accumulators to memory. Each warp has 16 rows and a part of the slab, in
// which threads put whole rows together.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include <warploom/compute/output.cuh>
#include <warploom/hopper/shared.cuh>

namespace warploom::hopper {

template <class K>
class OutputWriter {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Variant = typename K::Variant;
  using Element = typename C::Element;
  using Mma = WarpMma<K>;
  using Output = typename Mma::Output;

  static constexpr int kSlabRows = kWarpSize / S::kRowThreads;  // of a warp
  // Of rounded output 8 rows x 64 lanes, or 16 x 32, pass through the slab at a time: eight blocks
  // of accumulators, and two vectors for each thread.
  using Round = SmemTile<64 / S::kRowThreads, S::kBlock, S::kBlock>;
  static constexpr int kRoundRows = 64 / S::kRowThreads;
  static_assert(Round::kBytes <= kSlabRows * Shared<K>::kSlabStride * int(sizeof(float)));

 public:
  WL_FN static void write(const Item<K>& item, const Softmax<K>& softmax, const Output& output) {
    if (Variant::kHasOutputTransform || item.facts().slot >= 0) {
      write_in_float(item, softmax, output);
    } else {
      write_final(item, softmax, output);
    }
  }

 private:
  // Final rows without an output transform are rounded on their way into the slab.
  WL_FN static void write_final(const Item<K>& item, const Softmax<K>& softmax,
                                const Output& output) {
    Element* const slab = reinterpret_cast<Element*>(item.arena.slab_row(first_slab_row()));
    const int vector = Fragments<K>::lane() % S::kRowThreads * kVector;
    const float scales[2] = {scale_of(softmax, 0), scale_of(softmax, 1)};
#pragma unroll
    for (int first = 0; first < 16; first += kRoundRows) {
      Element* to[2];
      bool exists[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = Fragments<K>::block_row(0) + first + row_of_round(i);
        exists[i] = row < item.facts().rows;
        to[i] = static_cast<Element*>(item.p.o) + item.o_offset(item.row(row)) + vector;
      }
#pragma unroll
      for (int panel = 0; panel < S::kDimV; panel += S::kBlock) {
        put_rounded(output, scales, first / 8, panel / 8, slab);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (exists[i] && (C::kHeadDimV == S::kDimV || panel + vector < C::kHeadDimV)) {
            *reinterpret_cast<uint4*>(to[i] + panel) =
                *reinterpret_cast<const uint4*>(slab + Round::offset(row_of_round(i), vector));
          }
        }
        __syncwarp();
      }
    }
    if (item.p.lse != nullptr) write_lse(item, softmax);
    if constexpr (kTellsMaxScores<K>) write_max_scores(item, softmax);
  }

  // Row of a round that a thread stores in its i-th vector.
  WL_FN static int row_of_round(int i) {
    return i * (kWarpSize / S::kRowThreads) + Fragments<K>::lane() / S::kRowThreads;
  }

  // Rounds eight blocks of 8 x 8 accumulators, of one half of the warp's rows or of both.
  WL_FN static void put_rounded(const Output& output, const float (&scales)[2], int first_half,
                                int first_block, Element* slab) {
    constexpr int kHalves = kRoundRows / 8;
#pragma unroll
    for (int m = 0; m < 8; m += 4) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = first_half + (m + i) % kHalves, block = first_block + (m + i) / kHalves;
        words[i] = warploom::pack(Element{}, output[0][block][2 * half] * scales[half],
                                  output[0][block][2 * half + 1] * scales[half]);
      }
      // Lanes 8 i to 8 i + 7 give the addresses of the rows of block m + i.
      const int own = m + Fragments<K>::lane() / 8;
      const int row = Fragments<K>::lane() % 8 + own % kHalves * 8;
      auto& to =
          *reinterpret_cast<cute::uint128_t*>(slab + Round::offset(row, own / kHalves * kVector));
      cute::SM90_U32x4_STSM_N::copy(words[0], words[1], words[2], words[3], to);
    }
  }

  WL_FN static void write_lse(const Item<K>& item, const Softmax<K>& softmax) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = ThreadRows<K>::row(half);
      if (row >= item.facts().rows || Fragments<K>::lane() % 4 != 0) continue;
      item.p.lse[item.lse_offset(item.row(row))] =
          row_lse<K>(softmax_state(softmax, half), softmax.factor) * item.p.lse_scale;
    }
  }

  WL_FN static void write_max_scores(const Item<K>& item, const Softmax<K>& softmax) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = ThreadRows<K>::row(half);
      if (row >= item.facts().rows || Fragments<K>::lane() % 4 != 0) continue;
      write_max_score(item, item.row(row), softmax_state(softmax, half));
    }
  }

  // Partial rows, and rows that the output transform must see whole: a few at a time.
  WL_FN static void write_in_float(const Item<K>& item, const Softmax<K>& softmax,
                                   const Output& output) {
    const int lane = Fragments<K>::lane();
#pragma unroll
    for (int round = 0; round < 16 / kSlabRows; ++round) {
      const int half = round * kSlabRows / 8;  // which of the thread's two rows
      const int first = round * kSlabRows % 8;
      const float scale = scale_of(softmax, half);
      if (lane / 4 >= first && lane / 4 < first + kSlabRows) {
        float* to = item.arena.slab_row(first_slab_row() + lane / 4 - first) + lane % 4 * 2;
#pragma unroll
        for (int l = 0; l < Mma::kLaneBlocks; ++l) {
          *reinterpret_cast<float2*>(to + 8 * l) =
              make_float2(output[0][l][2 * half] * scale, output[0][l][2 * half + 1] * scale);
        }
      }
      const int slab_row = lane / S::kRowThreads;
      const SoftmaxState own = softmax_state(softmax, half);
      const int owner = 4 * (first + slab_row);
      const SoftmaxState state{__shfl_sync(kAllLanes, own.largest, owner),
                               __shfl_sync(kAllLanes, own.sum, owner)};
      __syncwarp();
      const int row = Fragments<K>::block_row(0) + round * kSlabRows + slab_row;
      RowStore<K>::write(item, row, row < item.facts().rows,
                         item.arena.slab_row(first_slab_row() + slab_row), state);
      __syncwarp();
    }
  }

  WL_FN static float scale_of(const Softmax<K>& softmax, int half) {
    return Variant::kSoftmax ? row_scale(softmax.sum[half]) : 1.0f;
  }
  WL_FN static int first_slab_row() { return threadIdx.x / kWarpSize * kSlabRows; }
};

}  // namespace warploom::hopper
