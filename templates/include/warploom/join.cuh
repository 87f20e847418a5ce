// Composed plans: rows whose keys lie in several parts. When all work items are done, all CTAs join
// their partial results together, under the operator of FlashInfer, section 2.2, in ascending order
// of keys.
//
// A piece of a prefix completes the rows of many requests, and its CTA would join them all while
// the others had nothing to do. So CTAs wait for each other, but not for ever: nothing promises
// that all of them run at the same time. One that has waited long leaves; the last one to be done
// never waits, and takes what is left.
#pragma once

#include <warploom/merge.cuh>

namespace warploom {

// Counters in Params::arrivals, zero between launches.
enum JoinCounter : int { kDoneCtas = 0, kTakenRows = 1, kLeftCtas = 2 };

constexpr long long kLongestWait = 1 << 18;  // cycles, about 140 us
constexpr int kJoinBatch = 8;                // partial rows on their way at a time

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

// Joins the partial results of one row by the threads of that row, several of them on their way at
// a time. They keep its position themselves: rows in shared memory are those of the last item,
// which the copying warps of a Hopper kernel may still read, and none where a CTA had no item.
template <class K>
WL_FN void join_row(const Item<K>& item, const typename K::Join& join, bool exists) {
  using S = Sizes<K>;
  constexpr int kNumbers = S::kDimV / S::kBlock * kVector;
  const Row<K> row = item.row_of_unit(join.row, join.kv_head);
  JoinedRow<K::Variant::kSoftmax, kNumbers> joined{softmax_factor<K>(item.p)};
#pragma unroll 1
  for (int first = 0; first < join.count; first += kJoinBatch) {
    long long at[kJoinBatch];
#pragma unroll
    for (int i = 0; i < kJoinBatch; ++i) {
      at[i] = __ldg(item.p.contributions + join.first + min(first + i, join.count - 1)) +
              join.row % kRowCode;
    }
    SoftmaxState states[kJoinBatch];
    alignas(16) float parts[kJoinBatch][kNumbers];
#pragma unroll
    for (int i = 0; i < kJoinBatch; ++i) {
      states[i] = load_state(item, at[i], first + i < join.count);
    }
#pragma unroll
    for (int i = 0; i < kJoinBatch; ++i) {
      load_panels(item, at[i], first + i < join.count, parts[i]);
    }
    joined.join(states, parts);
  }
  float* slab = item.arena.slab_row(threadIdx.x / S::kRowThreads);
  store_joined<K>(joined, slab);
  __syncwarp();
  RowStore<K>::write_final(item, row, exists, slab, joined.state);
}

// Lets joins, and the first of what they join, come to L2 while CTAs wait: a line from each of them
// in turn. The rows of a unit share contributions, so that some lines may lie behind the last one,
// which costs nothing.
template <class K>
WL_FN void prefetch_joins(const typename K::Params& p, int total) {
  constexpr int kLine = 32;  // integers
  const int first = (threadIdx.x * gridDim.x + blockIdx.x) * kLine;
  if (first < total * int(sizeof(typename K::Join) / sizeof(int))) prefetch(p.joins + first);
  if (first < total) prefetch(p.contributions + first);
}

// After a CTA's last item, by all threads that compute; `item` gives parameters and memory.
template <class K>
WL_FN void join_rows(const Item<K>& item) {
  using Join = typename K::Join;
  constexpr int kRows = RowStore<K>::kRoundRows;  // that a CTA joins at a time
  auto& facts = item.arena.facts();
  const int total =
      __ldg(&reinterpret_cast<const typename K::PlanHeader*>(item.p.header)->num_merges);
  if (total == 0) return;  // in all CTAs
  prefetch_joins<K>(item.p, total);
  unsigned* counters = item.p.arrivals;
  const int thread_row = threadIdx.x / Sizes<K>::kRowThreads;
  item.arena.sync();  // our rows are written, and the memory of items is free
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
    const auto join = load_record<Join>(item.p.joins, exists ? first + thread_row : first);
    join_row(item, join, exists);
    item.arena.sync();  // slabs and the index are read
  }
  // Released and acquired: the zeros come after everyone's last look at the counters.
  if (threadIdx.x == 0 && count_release_acquire(counters + kLeftCtas) + 1 == gridDim.x) {
    counters[kDoneCtas] = counters[kTakenRows] = counters[kLeftCtas] = 0;
  }
}

}  // namespace warploom
