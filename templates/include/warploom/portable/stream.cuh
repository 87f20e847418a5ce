// The portable kernel for few query rows (decoding): all warps share the rows, and each streams its
// own keys, from item to item without a stop.
//
// One more warp, the prefetch warp, works ahead: while item i is computed it opens item i + 2 and
// fetches the queries of item i + 1. So a warp whose copies of item i's keys are all in flight
// starts with those of item i + 1, and memory stays busy while results are merged and written.
#pragma once

#include <warploom/items/merge.cuh>
#include <warploom/items/row_merges.cuh>
#include <warploom/items/stamp.cuh>
#include <warploom/portable/attend.cuh>

namespace warploom {

// The item of an index; facts and rows lie in one of Arena::kItems slots, in turn.
template <class K>
WL_FN Item<K> item_of(const typename K::Params& p, char* shared_memory, int index) {
  return {p, {shared_memory, index}};
}

template <class K>
class PrefetchWarp {
  using C = typename K::Config;
  using Copy = RowCopy<C::kRows, C::kHeadDimQk, Sizes<K>::kDimQk, Sizes<K>::kBlock, kWarpSize>;

 public:
  // Prepares items, of which the first is already open. Before the barrier at the beginning of an
  // item it copies the item's queries and opens the next item.
  WL_FN static void run(const typename K::Params& p, char* shared_memory, int first, int end) {
    for (int i = first; i < end; ++i) {
      const unsigned lane = threadIdx.x % kWarpSize;
      const Item<K> item = item_of<K>(p, shared_memory, i);
      copy_queries<Copy>(item, item.arena.queries(), lane);
      if (i + 1 < end) {
        item_of<K>(p, shared_memory, i + 1).open(load_opening<K>(p, i + 1), i + 1, lane, kWarpSize);
      }
      cute::cp_async_wait<0>();
      if constexpr (K::Variant::kHasQueryTransform) {
        __syncwarp();
        transform_queries<kWarpSize>(item, item.arena.queries(), lane);
      }
      K::template Arena<K>::sync_all();
    }
  }
};

// All items of a list, by all threads of the tile.
template <class K>
WL_FN void stream_items(const typename K::Params& p, char* shared_memory, const Opening<K>& opening,
                        int first, int end) {
  const Item<K> opened = item_of<K>(p, shared_memory, first);
  opened.open(opening, first, threadIdx.x, Sizes<K>::kThreads + kWarpSize);
  K::template Arena<K>::sync_all();
  if (threadIdx.x >= Sizes<K>::kThreads) return PrefetchWarp<K>::run(p, shared_memory, first, end);
  typename K::template Arena<K>::Pipeline pipeline(opened, first, end);
  pipeline.look_up();
  sync_group<K>();
  pipeline.start();
  for (int i = first; i < end; ++i) {
    K::template Arena<K>::sync_all();  // the prefetch warp is ready, and slabs are read
    const Stamp<K> stamp(p, i);
    const Item<K> item = item_of<K>(p, shared_memory, i);
    typename WarpMma<K>::Output output = {};
    Softmax<K> softmax(softmax_factor<K>(p));
    pipeline.begin(i);
    attend(item, pipeline, softmax, output);
    write_merged_rows(item, softmax, output);
    merge_if_last(item);
  }
  pipeline.finish();
}

template <class K>
WL_FN void stream_list(const typename K::Params& p, char* shared_memory, unsigned list) {
  const int first = __ldg(p.cta_indptr + list), end = __ldg(p.cta_indptr + list + 1);
  const auto opening = load_first_opening<K>(p, list);
  if (first < end) stream_items<K>(p, shared_memory, opening, first, end);
}

template <class K>
WL_FN void run_stream_kernel(const typename K::Params& p, char* shared_memory) {
  stream_list<K>(p, shared_memory, blockIdx.x);
  if constexpr (K::Config::kComposed) {
    if (threadIdx.x < Sizes<K>::kThreads) merge_composed_rows(item_of<K>(p, shared_memory, 0));
  }
}

}  // namespace warploom
