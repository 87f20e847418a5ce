// Composed plans: rows whose keys lie in several parts. When all work items are done, all CTAs join
// their partial results together, under the operator of FlashInfer, section 2.2, in ascending order
// of keys.
//
// A piece of a prefix completes the rows of many requests, and its CTA would join them all while
// the others had nothing to do. So CTAs wait for each other, but not for ever: nothing promises
// that all of them run at the same time. One that has waited long leaves; the last one to be done
// never waits, and takes what is left.
#pragma once

#include <warploom/output.cuh>

namespace warploom {

// Counters in Params::arrivals, zero between launches.
enum JoinCounter : int { kDoneCtas = 0, kTakenRows = 1, kLeftCtas = 2 };

constexpr long long kLongestWait = 1 << 18;  // cycles, about 140 us
constexpr int kJoinBatch = 8;                // partial rows on their way at a time

// True when all CTAs have done their items; false after a long time.
WL_FN bool wait_for_others(unsigned* counters) {
  __threadfence();  // our rows, before the count
  if (atomicAdd(counters + kDoneCtas, 1u) + 1 == gridDim.x) return true;
  const long long begin = clock64();
  while (load_acquire(counters + kDoneCtas) < gridDim.x) {
    if (clock64() - begin > kLongestWait) return false;
    __nanosleep(64);
  }
  return true;
}

// Some partial results of a row: where they lie, their sums and this thread's lanes of them.
template <class K>
struct JoinBatch {
  using S = Sizes<K>;
  using C = typename K::Config;
  static constexpr int kPanels = S::kDimV / S::kBlock;

  float lse2[kJoinBatch];  // -inf past the last one
  float4 part[kJoinBatch][kPanels][2];

  // Loads results first, first + 1, ..., as many as there are, all at once.
  WL_FN JoinBatch(const Item<K>& item, const typename K::Join& join, int first) {
    long long at[kJoinBatch];
#pragma unroll
    for (int i = 0; i < kJoinBatch; ++i) {
      at[i] = __ldg(item.p.contributions + join.first + min(first + i, join.count - 1)) +
              join.row % kRowCode;
    }
    // Other CTAs wrote these in this launch: only L2 has them.
#pragma unroll
    for (int i = 0; i < kJoinBatch; ++i) {
      lse2[i] = first + i < join.count ? __ldcg(item.p.partial_lse + at[i]) : -kInfinity;
    }
#pragma unroll
    for (int i = 0; i < kJoinBatch; ++i) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const int lane = panel * S::kBlock + RowStore<K>::first_lane();
        const bool exists = first + i < join.count && lane < C::kHeadDimV;
        const auto from =
            reinterpret_cast<const float4*>(item.p.partial_o + at[i] * C::kHeadDimV + lane);
        part[i][panel][0] = exists ? __ldcg(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        part[i][panel][1] = exists ? __ldcg(from + 1) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  }
};

// Joins the partial results of one row by the threads of that row. They keep its position
// themselves: rows in shared memory are those of the last item, which the copying warps of a Hopper
// kernel may still read, and none where a CTA had no item.
template <class K>
WL_FN void join_row(const Item<K>& item, const typename K::Join& join, bool exists) {
  using S = Sizes<K>;
  constexpr bool kSoftmax = K::Variant::kSoftmax;
  constexpr int kPanels = JoinBatch<K>::kPanels;
  const Row<K> row = item.row_of_unit(join.row, join.kv_head);
  float joined[kPanels][kVector] = {};
  float largest = -kInfinity, sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < join.count; first += kJoinBatch) {
    const JoinBatch<K> batch(item, join, first);
    float reference = largest;
#pragma unroll
    for (int i = 0; i < kJoinBatch; ++i) reference = max(reference, batch.lse2[i]);
    const float base = reference == -kInfinity ? 0.0f : reference;
    const float old_weight = kSoftmax ? exp2(largest - base) : 1.0f;
    largest = reference;
    sum *= old_weight;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) joined[panel][e] *= old_weight;
    }
#pragma unroll
    for (int i = 0; i < kJoinBatch; ++i) {
      const float weight = kSoftmax ? exp2(batch.lse2[i] - base) : 1.0f;
      sum += weight;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const float4 low = batch.part[i][panel][0], high = batch.part[i][panel][1];
        const float values[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int e = 0; e < kVector; ++e) joined[panel][e] += values[e] * weight;
      }
    }
  }
  const float scale = kSoftmax ? row_scale(sum) : 1.0f;
  float* slab = item.arena.slab_row(threadIdx.x / S::kRowThreads);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      slab[panel * S::kBlock + RowStore<K>::first_lane() + e] = joined[panel][e] * scale;
    }
  }
  __syncwarp();
  RowStore<K>::write_final(item, row, exists, slab, kSoftmax ? row_lse(largest, sum, 1.0f) : 0.0f);
}

// After a CTA's last item, by all threads that compute; `item` gives parameters and memory.
template <class K>
WL_FN void join_rows(const Item<K>& item) {
  using Join = typename K::Join;
  constexpr int kRows = RowStore<K>::kPassRows;  // that a CTA joins at a time
  auto& facts = item.arena.facts();
  const int total =
      __ldg(&reinterpret_cast<const typename K::PlanHeader*>(item.p.header)->num_merges);
  if (total == 0) return;  // in all CTAs
  unsigned* counters = item.p.arrivals;
  const int thread_row = threadIdx.x / Sizes<K>::kRowThreads;
  item.arena.sync();  // our rows are written, and the memory of items is free
  if (threadIdx.x == 0) facts.is_last = wait_for_others(counters);
  item.arena.sync();
  __threadfence();  // the count, before the others' rows
  while (facts.is_last) {
    if (threadIdx.x == 0) {
      facts.index = int(atomicAdd(counters + kTakenRows, unsigned(kRows)));
    }
    item.arena.sync();
    const int first = facts.index;
    if (first >= total) break;
    const bool exists = first + thread_row < total;
    const auto join = load_record<Join>(item.p.joins, exists ? first + thread_row : first);
    join_row(item, join, exists);
    item.arena.sync();  // slabs and the index are read
  }
  if (threadIdx.x == 0 && atomicAdd(counters + kLeftCtas, 1u) + 1 == gridDim.x) {
    counters[kDoneCtas] = counters[kTakenRows] = counters[kLeftCtas] = 0;
  }
}

}  // namespace warploom
