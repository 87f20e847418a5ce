// Composed plans: rows whose keys lie in several parts. When all work items are done, all CTAs
// merge their partial results together, under the operator of FlashInfer, section 2.2, in ascending
// order of keys.
//
// A piece of a prefix completes the rows of many requests, and its CTA would merge them all while
// the other CTAs were idle. So CTAs wait for each other before they merge, but not for ever:
// nothing guarantees that all CTAs run at the same time. A CTA that has waited too long leaves. The
// last CTA to finish its items never waits, and merges what is left.
#pragma once

#include <warploom/items/merge.cuh>

namespace warploom {

// Counters in Params::arrivals, zero between launches.
enum RowMergeCounter : int { kDoneCtas = 0, kTakenRows = 1, kLeftCtas = 2 };

constexpr long long kLongestWait = 1 << 18;  // cycles, about 140 us
constexpr int kMergeBatch = 8;               // partial rows in flight at a time

// True when all CTAs have done their items; false after a long time.
WL_FN bool wait_for_others(unsigned* counters) {
  if (count_release_acquire(counters + kDoneCtas) + 1 == gridDim.x) return true;
  const long long begin = clock64();
  while (load_acquire(counters + kDoneCtas) < gridDim.x) {
    if (clock64() - begin > kLongestWait) return false;
    __nanosleep(64);
  }
  return true;
}

// Merges the partial results of one row by the threads of that row, kMergeBatch results in flight
// at a time. They keep the row's position themselves: rows in shared memory are those of the last
// item, which the copying warps of a Hopper kernel may still read, and a CTA without items has
// none.
template <class K>
WL_FN void merge_composed_row(const Item<K>& item, const typename K::RowMerge& row_merge,
                              bool exists) {
  using S = Sizes<K>;
  constexpr int kNumbers = S::kDimV / S::kBlock * kVector;
  const Row<K> row = item.row_of_unit(row_merge.row, row_merge.kv_head);
  MergedRow<K::Variant::kSoftmax, kNumbers> merged{softmax_factor<K>(item.p)};
#pragma unroll 1
  for (int first = 0; first < row_merge.count; first += kMergeBatch) {
    long long at[kMergeBatch];
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      at[i] = __ldg(item.p.contributions + row_merge.first + min(first + i, row_merge.count - 1)) +
              row_merge.row % kRowCode;
    }
    SoftmaxState states[kMergeBatch];
    alignas(16) float parts[kMergeBatch][kNumbers];
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      states[i] = load_state(item, at[i], first + i < row_merge.count);
    }
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      load_panels(item, at[i], first + i < row_merge.count, parts[i]);
    }
    merged.merge(states, parts);
  }
  float* slab = item.arena.slab_row(threadIdx.x / S::kRowThreads);
  store_merged<K>(merged, slab);
  __syncwarp();
  RowStore<K>::write_final(item, row, exists, slab, merged.state);
}

// Prefetches the records of row merges, and as many contributions, to L2 while CTAs wait: thread t
// of CTA b takes line t * CTAs + b. There may be fewer contributions, since the rows of a unit
// share them; a line behind their end costs nothing.
template <class K>
WL_FN void prefetch_row_merges(const typename K::Params& p, int total) {
  constexpr int kLine = 32;  // integers
  const int first = (threadIdx.x * gridDim.x + blockIdx.x) * kLine;
  if (first < total * int(sizeof(typename K::RowMerge) / sizeof(int)))
    prefetch(p.row_merges + first);
  if (first < total) prefetch(p.contributions + first);
}

// After a CTA's last item, by all threads that compute; `item` gives parameters and memory.
template <class K>
WL_FN void merge_composed_rows(const Item<K>& item) {
  using RowMerge = typename K::RowMerge;
  constexpr int kRows = RowStore<K>::kRoundRows;  // that a CTA merges at a time
  auto& facts = item.arena.facts();
  const int total =
      __ldg(&reinterpret_cast<const typename K::PlanHeader*>(item.p.header)->num_merges);
  if (total == 0) return;  // in all CTAs
  prefetch_row_merges<K>(item.p, total);
  unsigned* counters = item.p.arrivals;
  const int thread_row = threadIdx.x / Sizes<K>::kRowThreads;
  item.arena.sync();  // this CTA's rows are written, and the memory of items is free
  if (threadIdx.x == 0) facts.is_last = wait_for_others(counters);
  item.arena.sync();
  while (facts.is_last) {
    if (threadIdx.x == 0) {
      facts.index = int(atomicAdd(counters + kTakenRows, unsigned(kRows)));
    }
    item.arena.sync();
    const int first = facts.index;
    if (first >= total) break;
    const bool exists = first + thread_row < total;
    const auto row_merge =
        load_record<RowMerge>(item.p.row_merges, exists ? first + thread_row : first);
    merge_composed_row(item, row_merge, exists);
    item.arena.sync();  // slabs and the index are read
  }
  // Release and acquire: the zeros come after every CTA's last look at the counters.
  if (threadIdx.x == 0 && count_release_acquire(counters + kLeftCtas) + 1 == gridDim.x) {
    counters[kDoneCtas] = counters[kTakenRows] = counters[kLeftCtas] = 0;
  }
}

}  // namespace warploom
