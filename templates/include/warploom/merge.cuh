// Joining the partial results of a tile whose keys were split: attention states under the operator
// of FlashInfer, section 2.2, always in ascending order of keys.
#pragma once

#include <warploom/output.cuh>

namespace warploom {

// Counts this CTA's partial result; true for the one that finds all others written. The counter is
// left at zero for the next launch.
template <class K>
WL_FN bool is_last_arrival(const Item<K>& item, int num_slots) {
  __threadfence();  // our slot, before the count
  item.arena.sync();
  if (threadIdx.x == 0) {
    unsigned* counter = item.p.arrivals + item.facts().merge;
    const bool is_last = atomicAdd(counter, 1u) == unsigned(num_slots) - 1;
    if (is_last) *counter = 0;
    item.arena.facts().is_last = is_last;
  }
  item.arena.sync();
  __threadfence();  // the count, before the others' slots
  return item.facts().is_last;
}

// Joins slots of the tile, writes the final rows.
template <class K>
WL_FN void merge_slots(const Item<K>& item, int first_slot, int num_slots) {
  using S = Sizes<K>;
  using C = typename K::Config;
  constexpr int kPanels = S::kDimV / S::kBlock;
  if (S::kSingle && threadIdx.x >= kWarpSize) return;  // others would have no row
  const unsigned thread_row = threadIdx.x / S::kRowThreads;
  float* slab = item.arena.slab_row(thread_row);
  for (int first = 0; first < item.facts().rows; first += RowStore<K>::kPassRows) {
    const bool exists = first + thread_row < item.facts().rows;
    const int row = exists ? first + thread_row : 0;
    float joined[kPanels][kVector] = {};
    float largest = -kInfinity, sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < num_slots; ++i) {
      const long long slot_row = static_cast<long long>(first_slot + i) * C::kRows + row;
      // Other CTAs wrote these in this launch: only L2 has them.
      const float lse2 = __ldcg(item.p.partial_lse + slot_row);
      const float reference = max(largest, lse2);
      float old_weight = 1.0f, weight = 1.0f;
      if constexpr (K::Variant::kSoftmax) {
        const float base = reference == -kInfinity ? 0.0f : reference;
        old_weight = exp2(largest - base);
        weight = exp2(lse2 - base);  // not a number if the part's result is none
      }
      sum = sum * old_weight + weight;
      largest = reference;
      const float* from = item.p.partial_o + slot_row * C::kHeadDimV;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const int lane = panel * S::kBlock + RowStore<K>::first_lane();
        if (lane >= C::kHeadDimV) continue;
        const float4 low = __ldcg(reinterpret_cast<const float4*>(from + lane));
        const float4 high = __ldcg(reinterpret_cast<const float4*>(from + lane + 4));
        const float part[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          joined[panel][e] = joined[panel][e] * old_weight + part[e] * weight;
        }
      }
    }
    const float scale = K::Variant::kSoftmax ? row_scale(sum) : 1.0f;
    __syncwarp();  // the slab row may still be read for the row before
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        slab[panel * S::kBlock + RowStore<K>::first_lane() + e] = joined[panel][e] * scale;
      }
    }
    __syncwarp();
    const float lse2 = K::Variant::kSoftmax ? row_lse(largest, sum, 1.0f) : 0.0f;
    RowStore<K>::write_final(item, item.row(row), exists, slab, lse2);
  }
}

template <class K>
WL_FN void merge_if_last(const Item<K>& item) {
  if (item.facts().merge < 0) return;
  const int2 merge = __ldg(reinterpret_cast<const int2*>(item.p.merges) + item.facts().merge);
  if (is_last_arrival(item, merge.y)) merge_slots(item, merge.x, merge.y);
}

}  // namespace warploom
