// Merging the partial results of a tile whose keys were split: attention states under the operator
// of FlashInfer, section 2.2, always in ascending order of keys.
#pragma once

#include <warploom/compute/output.cuh>
#include <warploom/device/qualifiers.cuh>

namespace warploom {

// Counts this CTA's partial result; true for the CTA that finds all others written. The counter is
// left at zero for the next launch.
template <class K>
WL_FN bool is_last_arrival(const Item<K>& item, int num_slots) {
  item.arena.sync();  // our slot is written
  if (threadIdx.x == 0) {
    unsigned* counter = item.p.arrivals + item.facts().merge;
    const bool is_last = count_release_acquire(counter) == unsigned(num_slots) - 1;
    if (is_last) *counter = 0;
    item.arena.facts().is_last = is_last;
  }
  item.arena.sync();
  return item.facts().is_last;
}

// Four numbers of a partial row. Other CTAs wrote the row in this launch: only L2 has it.
template <class K>
WL_FN void load_partial(const Item<K>& item, long long row, int lane, bool exists, float* numbers) {
  const auto from =
      reinterpret_cast<const float4*>(item.p.partial_o + row * K::Config::kHeadDimV + lane);
  *reinterpret_cast<float4*>(numbers) = exists ? __ldcg(from) : make_float4(0.f, 0.f, 0.f, 0.f);
}

// The state of a partial row, or that of a part without keys.
template <class K>
WL_FN SoftmaxState load_state(const Item<K>& item, long long row, bool exists) {
  if (!exists) return {-kInfinity, 0.0f};
  const float2 state = __ldcg(partial_states(item) + row);
  return {state.x, state.y};
}

// A row into which partial results are merged; each thread has some numbers of it.
template <bool kSoftmax, int kNumbers>
struct MergedRow {
  float factor;  // of logits, to base 2
  SoftmaxState state = {-kInfinity, 0.0f};
  float numbers[kNumbers] = {};

  // Merges kCount results at once. Each is normalised, and its weight is its sum.
  template <int kCount>
  WL_FN void merge(const SoftmaxState (&states)[kCount], const float (&parts)[kCount][kNumbers]) {
    float largest = state.largest;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = ::fmaxf(largest, states[i].largest);
    const float base = abs(largest) < kInfinity ? largest : 0.0f;
    const float old_weight = kSoftmax ? exp2((state.largest - base) * factor) : 1.0f;
    state = {largest, state.sum * old_weight};
#pragma unroll
    for (float& number : numbers) number *= old_weight;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // NaN if the partial result is NaN
      const float weight =
          kSoftmax ? states[i].sum * exp2((states[i].largest - base) * factor) : 1.0f;
      state.sum += weight;
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) numbers[n] += parts[i][n] * weight;
    }
  }
  WL_FN float scale() const { return kSoftmax ? row_scale(state.sum) : 1.0f; }
};

// Merges the slots of a tile of one row, by a warp: eight (for wide heads four) in flight at a
// time.
template <class K>
WL_CALLED_FN void merge_row(Item<K> item, int first_slot, int num_slots) {
  using C = typename K::Config;
  constexpr int kLanes = 4 * kWarpSize, kVectors = (C::kHeadDimV + kLanes - 1) / kLanes;
  constexpr int kAtOnce = 8 / kVectors;
  MergedRow<K::Variant::kSoftmax, 4 * kVectors> merged{softmax_factor<K>(item.p)};
  const int first_lane = threadIdx.x * 4;
#pragma unroll 1
  for (int first = 0; first < num_slots; first += kAtOnce) {
    SoftmaxState states[kAtOnce];
    alignas(16) float parts[kAtOnce][4 * kVectors];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool exists = first + i < num_slots;
      const int slot = first_slot + min(first + i, num_slots - 1);
      states[i] = load_state(item, slot, exists);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int lane = first_lane + v * kLanes;
        load_partial(item, slot, lane, exists && lane < C::kHeadDimV, parts[i] + 4 * v);
      }
    }
    merged.merge(states, parts);
  }
  float* slab = item.arena.slab_row(0);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int lane = first_lane + v * kLanes;
    const float* x = merged.numbers + 4 * v;
    const float scale = merged.scale();
    if (lane >= C::kHeadDimV) continue;
    *reinterpret_cast<float4*>(slab + lane) =
        make_float4(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale);
  }
  __syncwarp();
  RowStore<K>::write_final(item, item.row(0), threadIdx.x < Sizes<K>::kRowThreads, slab,
                           merged.state);
}

// Puts this thread's numbers of a merged row, eight of each panel, into a slab row.
template <class K, class Row>
WL_FN void store_merged(const Row& merged, float* slab) {
  using S = Sizes<K>;
  const float scale = merged.scale();
#pragma unroll
  for (int panel = 0; panel < S::kDimV / S::kBlock; ++panel) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      slab[panel * S::kBlock + RowStore<K>::first_lane() + e] =
          merged.numbers[panel * kVector + e] * scale;
    }
  }
}

// This thread's numbers of a partial row, eight of each panel.
template <class K>
WL_FN void load_panels(const Item<K>& item, long long row, bool exists, float* numbers) {
  using S = Sizes<K>;
#pragma unroll
  for (int panel = 0; panel < S::kDimV / S::kBlock; ++panel) {
    const int lane = panel * S::kBlock + RowStore<K>::first_lane();
    const bool is_lane = exists && lane < K::Config::kHeadDimV;
    load_partial(item, row, lane, is_lane, numbers + panel * kVector);
    load_partial(item, row, lane + 4, is_lane, numbers + panel * kVector + 4);
  }
}

// Merges the slots of a tile, and writes the final rows.
template <class K>
WL_FN void merge_slots(const Item<K>& item, int first_slot, int num_slots) {
  using S = Sizes<K>;
  using C = typename K::Config;
  constexpr int kNumbers = S::kDimV / S::kBlock * kVector;
  const unsigned thread_row = threadIdx.x / S::kRowThreads;
  float* slab = item.arena.slab_row(thread_row);
  for (int first = 0; first < item.facts().rows; first += RowStore<K>::kRoundRows) {
    const bool exists = first + thread_row < item.facts().rows;
    const int row = exists ? first + thread_row : 0;
    MergedRow<K::Variant::kSoftmax, kNumbers> merged{softmax_factor<K>(item.p)};
#pragma unroll 4
    for (int i = 0; i < num_slots; ++i) {
      const long long slot_row = static_cast<long long>(first_slot + i) * kSlotRows<C> + row;
      const SoftmaxState states[] = {load_state(item, slot_row, true)};
      alignas(16) float part[1][kNumbers];
      load_panels(item, slot_row, true, part[0]);
      merged.merge(states, part);
    }
    __syncwarp();  // the slab row may still be read for the row before
    store_merged<K>(merged, slab);
    __syncwarp();
    RowStore<K>::write_final(item, item.row(row), exists, slab, merged.state);
  }
}

template <class K>
WL_FN void merge_if_last(const Item<K>& item) {
  if (item.facts().merge < 0) return;
  const int2 merge = __ldg(reinterpret_cast<const int2*>(item.p.merges) + item.facts().merge);
  if (!is_last_arrival(item, merge.y)) return;
  if constexpr (Sizes<K>::kSingle) {
    if (threadIdx.x < kWarpSize) merge_row(item, merge.x, merge.y);
  } else {
    merge_slots(item, merge.x, merge.y);
  }
}

}  // namespace warploom
