// From accumulators to memory: rows go through fp32 slabs in shared memory, so that the warps of
// split keys can be merged, the output transform sees whole rows, and stores are 16 bytes wide.
#pragma once

#include <warploom/compute/softmax.cuh>
#include <warploom/hooks/vector_hooks.cuh>

namespace warploom {

// A row of the output, as functors read it.
struct OutputRow : LaneByLane<OutputRow> {
  const float* values;
  WL_FN explicit OutputRow(const float* v) : values(v) {}
  WL_FN float operator()(int lane) const { return values[lane]; }
};

// Of each row of each slot: what its exponents were taken from, and its sum.
template <class K>
WL_FN float2* partial_states(const Item<K>& item) {
  return reinterpret_cast<float2*>(item.p.partial_state);
}

// The threads of a row of the output, and what they do together. A warp must call these as a whole;
// `exists` says whether this thread's row does.
template <class K>
struct RowStore {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Element = typename C::Element;

  static constexpr int kRowThreads = S::kRowThreads;
  static constexpr int kRoundRows = S::kThreads / kRowThreads;
  WL_FN static int first_lane() { return threadIdx.x % kRowThreads * kVector; }

  // Writes a row of final values; `values` are its C::kHeadDimV floats in shared memory. An absent
  // row has a place too, since what functors load for it must exist.
  WL_FN static void write_final(const Item<K>& item, const Row<K>& row, bool exists,
                                const float* values, const SoftmaxState& state) {
    const OutputPlace<Row<K>> at{row, row_lse<K>(state, softmax_factor<K>(item.p))};
    OutputRow x{values};
    float r[OutputHook<K>::kReductions + 1];
    if constexpr (K::Variant::kHasOutputTransform) {
      reduce_lanes<OutputHook<K>>(item, at, x, threadIdx.x % kRowThreads, r);
    }
    if (!exists) return;
    Element* to = static_cast<Element*>(item.p.o) + item.o_offset(at.row);
#pragma unroll
    for (int lane = first_lane(); lane < C::kHeadDimV; lane += S::kBlock) {
      alignas(16) Element rounded[kVector];
      alignas(16) float row_values[kVector];
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        *reinterpret_cast<float4*>(row_values + i) =
            *reinterpret_cast<const float4*>(values + lane + i);
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        float value = row_values[i];
        if constexpr (K::Variant::kHasOutputTransform) {
          using Hook = OutputHook<K>;
          const auto of_row = Hook::own_tile_state(item, at);
          const auto of_lane = Hook::own_lane_state(item, at, of_row, lane + i);
          value = Hook::value(item, at, of_lane, lane + i, x, r);
        }
        rounded[i] = from_float<Element>(value);
      }
      *reinterpret_cast<uint4*>(to + lane) = *reinterpret_cast<const uint4*>(rounded);
    }
    if (item.p.lse != nullptr && first_lane() == 0) {
      item.p.lse[item.lse_offset(at.row)] = at.lse * item.p.lse_scale;
    }
    if constexpr (kTellsMaxScores<K>) {
      if (first_lane() == 0) write_max_score(item, at.row, state);
    }
  }

  // Writes a row of a partial result to the item's slot.
  WL_FN static void write_partial(const Item<K>& item, int row, bool exists, const float* values,
                                  const SoftmaxState& state) {
    if (!exists) return;
    // Composed plans count rows, not slots.
    const long long slot_row =
        static_cast<long long>(item.facts().slot) * (C::kComposed ? 1 : kSlotRows<C>)+row;
    float* to = item.p.partial_o + slot_row * C::kHeadDimV;
#pragma unroll
    for (int lane = first_lane(); lane < C::kHeadDimV; lane += S::kBlock) {
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        *reinterpret_cast<float4*>(to + lane + i) =
            *reinterpret_cast<const float4*>(values + lane + i);
      }
    }
    if (first_lane() == 0) partial_states(item)[slot_row] = make_float2(state.largest, state.sum);
  }

  WL_FN static void write(const Item<K>& item, int row, bool exists, const float* values,
                          const SoftmaxState& state) {
    if (item.facts().slot < 0) {
      write_final(item, item.row(row), exists, values, state);
    } else {
      write_partial(item, row, exists, values, state);
    }
  }
};

// One accumulator block, each row's two columns.
WL_FN void store_pairs(float* low, float* high, const float (&c)[4], float low_scale,
                       float high_scale) {
  *reinterpret_cast<float2*>(low) = make_float2(c[0] * low_scale, c[1] * low_scale);
  *reinterpret_cast<float2*>(high) = make_float2(c[2] * high_scale, c[3] * high_scale);
}

// Puts one 16-row block of a warp's accumulators into slab rows first, first + 1, ...
template <class K>
WL_FN void store_block(const Item<K>& item, int first,
                       const float (&block)[WarpMma<K>::kLaneBlocks][4], float low_scale,
                       float high_scale) {
  using Mma = WarpMma<K>;
  float* low = item.arena.slab_row(first + Fragments<K>::lane() / 4) + Mma::first_column();
  float* high = low + 8 * K::template Arena<K>::kSlabStride;
#pragma unroll
  for (int l = 0; l < Mma::kLaneBlocks; l += 2) {
    const float (&a)[4] = block[l], (&b)[4] = block[l + 1];
    if constexpr (Mma::O::kNarrowValues) {
      *reinterpret_cast<float4*>(low + 8 * l) =
          make_float4(a[0] * low_scale, b[0] * low_scale, a[1] * low_scale, b[1] * low_scale);
      *reinterpret_cast<float4*>(high + 8 * l) =
          make_float4(a[2] * high_scale, b[2] * high_scale, a[3] * high_scale, b[3] * high_scale);
    } else {
      store_pairs(low + 8 * l, high + 8 * l, a, low_scale, high_scale);
      store_pairs(low + 8 * l + 8, high + 8 * l + 8, b, low_scale, high_scale);
    }
  }
}

// Puts the accumulators of a tile of 8 rows into as many slab rows.
template <class K>
WL_FN void store_turned(const Item<K>& item, int first, const typename WarpMma<K>::Output& output) {
  using F = Fragments<K>;
#pragma unroll
  for (int l = 0; l < Sizes<K>::kDimV / 16; ++l) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int lane = 16 * l + WarpMma<K>::output_lane(i / 2);
      item.arena.slab_row(first + F::row(i % 2))[lane] = output[0][l][i];
    }
  }
}

// Every warp has its own rows: each writes them, block by block, through its own slab.
template <class K>
WL_FN void write_rows(const Item<K>& item, const Softmax<K>& softmax,
                      const typename WarpMma<K>::Output& output) {
  constexpr bool kSoftmax = K::Variant::kSoftmax;
  const unsigned lane = Fragments<K>::lane();
  const unsigned slab = 16 * (threadIdx.x / kWarpSize);
#pragma unroll
  for (int m = 0; m < Sizes<K>::kRowBlocks; ++m) {
    const float* sum = softmax.sum + 2 * m;
    store_block<K>(item, slab, output[m], kSoftmax ? row_scale(sum[0]) : 1.0f,
                   kSoftmax ? row_scale(sum[1]) : 1.0f);
    if (lane % 4 == 0) {
      item.arena.statistics(slab + lane / 4) = softmax_state(softmax, 2 * m);
      item.arena.statistics(slab + lane / 4 + 8) = softmax_state(softmax, 2 * m + 1);
    }
    __syncwarp();
    constexpr int kRowThreads = Sizes<K>::kRowThreads;
    for (int r = lane / kRowThreads; r < 16; r += kWarpSize / kRowThreads) {
      const int row = Fragments<K>::block_row(m) + r;
      RowStore<K>::write(item, row, row < item.facts().rows, item.arena.slab_row(slab + r),
                         item.arena.statistics(slab + r));
    }
    __syncwarp();
  }
}

// All warps have the same rows and different keys: what the result of each counts in a row, of
// which warp w has its part at slab row w * kStep + row. Returns the state of the whole row.
template <int kStep, class K>
WL_FN SoftmaxState warp_weights(const Item<K>& item, int row, float factor,
                                float (&weight)[K::Config::kWarps]) {
  constexpr int kWarps = K::Config::kWarps;
  if constexpr (!K::Variant::kSoftmax) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) weight[w] = 1.0f;
    return {0.0f, 1.0f};
  }
  float largest = -kInfinity, sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    largest = ::fmaxf(largest, item.arena.statistics(kStep * w + row).largest);
  }
  const float reference = abs(largest) < kInfinity ? largest : 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const SoftmaxState part = item.arena.statistics(kStep * w + row);
    weight[w] = exp2((part.largest - reference) * factor);
    sum += weight[w] * part.sum;
  }
  const float scale = row_scale(sum);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) weight[w] *= scale;
  return {largest, sum};
}

// Adds four numbers of a slab, weighted.
WL_FN void add(float4& sum, float weight, const float* numbers) {
  const float4 x = *reinterpret_cast<const float4*>(numbers);
  sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
}

// Merges these results in the order of warps.
template <class K>
WL_FN void write_merged_rows(const Item<K>& item, const Softmax<K>& softmax,
                             const typename WarpMma<K>::Output& output) {
  using S = Sizes<K>;
  constexpr int kWarps = K::Config::kWarps;
  using F = Fragments<K>;
  constexpr int kSlabRows = S::kSlabRows;
  const unsigned slab = kSlabRows * (threadIdx.x / kWarpSize);
  if constexpr (S::kTurned) {
    store_turned(item, slab, output);
  } else {
    store_block<K>(item, slab, output[0], 1.0f, 1.0f);
  }
  if (F::is_first_of_rows()) {
#pragma unroll
    for (int r = 0; r < F::kThreadRows; ++r) {
      item.arena.statistics(slab + F::row(r)) = softmax_state(softmax, r);
    }
  }
  item.arena.sync();
  const unsigned thread_row = threadIdx.x / S::kRowThreads;
  for (int first = 0; first < item.facts().rows; first += RowStore<K>::kRoundRows) {
    // A warp's threads have rows of their own, of the tile if not of the item; or all have none.
    const int row = first + thread_row;
    if (row >= K::Config::kRows) break;
    const bool exists = row < item.facts().rows;
    float weight[kWarps];
    const SoftmaxState state = warp_weights<kSlabRows>(item, row, softmax.factor, weight);
    __syncwarp();
#pragma unroll
    for (int l = RowStore<K>::first_lane(); l < S::kDimV; l += S::kBlock) {
#pragma unroll
      for (int i = l; i < l + kVector; i += 4) {
        float4 merged = {};
#pragma unroll
        for (int w = 0; w < kWarps; ++w)
          add(merged, weight[w], item.arena.slab_row(kSlabRows * w + row) + i);
        if (exists) *reinterpret_cast<float4*>(item.arena.slab_row(row) + i) = merged;
      }
    }
    __syncwarp();
    RowStore<K>::write(item, row, exists, item.arena.slab_row(row), state);
  }
}

}  // namespace warploom
