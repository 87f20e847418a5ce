// The portable attention kernel: FlashAttention-2's algorithm with mma.sync and cp.async, on sm_80
// and everything after it. Persistent CTAs run the plan's work items.
#pragma once

#include <warploom/device/overlap.cuh>
#include <warploom/items/merge.cuh>
#include <warploom/items/row_merges.cuh>
#include <warploom/items/stamp.cuh>
#include <warploom/portable/attend.cuh>
#include <warploom/portable/single.cuh>
#include <warploom/portable/stream.cuh>

namespace warploom {

template <class K>
WL_FN void run_item(const Item<K>& item) {
  KeyPipeline<K> pipeline(item, 0);
  pipeline.look_up();
  __syncthreads();
  copy_queries<QueryCopy<K>>(item, item.arena.queries(), threadIdx.x);
  pipeline.start();
  pipeline.wait();
  __syncthreads();  // all threads may now read queries and the positions of rows
  if constexpr (K::Variant::kHasQueryTransform) {
    transform_queries<Sizes<K>::kThreads>(item, item.arena.queries(), threadIdx.x);
    __syncthreads();
  }
  typename WarpMma<K>::Output output = {};
  Softmax<K> softmax(softmax_factor<K>(item.p));
  attend(item, pipeline, softmax, output);
  cute::cp_async_wait<0>();
  __syncthreads();  // the staged tiles are read; the slabs take their place
  write_rows(item, softmax, output);
  merge_if_last(item);
}

// Many rows: each warp has its own, and all see the same keys.
template <class K>
WL_FN void run_tall_list(const typename K::Params& p, char* shared_memory, unsigned list) {
  const Item<K> item{p, {shared_memory, 0}};
  int index = __ldg(p.cta_indptr + list);
  while (index < __ldg(p.cta_indptr + list + 1)) {
    const Stamp<K> stamp(p, index);
    item.open(load_opening<K>(p, index), index, threadIdx.x, Sizes<K>::kThreads);
    __syncthreads();
    run_item(item);
    index = item.facts().index + 1;
    __syncthreads();  // slabs and facts are read; the next item takes their place
  }
}

template <class K>
WL_FN void run_tall_kernel(const typename K::Params& p, char* shared_memory) {
  run_tall_list<K>(p, shared_memory, blockIdx.x);
  if constexpr (K::Config::kComposed) merge_composed_rows(Item<K>{p, {shared_memory, 0}});
}

template <class K>
WL_FN void run_portable_kernel(const typename K::Params& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  await_earlier_kernels();
  if constexpr (Sizes<K>::kSingle) {
    run_single_kernel<K>(p, shared_memory);
  } else if constexpr (Sizes<K>::kSplitKeys) {
    run_stream_kernel<K>(p, shared_memory);
  } else {
    run_tall_kernel<K>(p, shared_memory);
  }
}

}  // namespace warploom
