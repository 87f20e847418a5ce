// The portable kernel for few query rows (decoding): all warps share the rows, and each streams its
// own keys, from item to item without a stop.
//
// One more warp, the prefetch warp, works ahead: while item i is computed it opens item i + 2 and
// fetches the queries of item i + 1. So a warp whose copies of item i's keys are all in flight
// starts with those of item i + 1, and memory stays busy while results are merged and written.
//
// In a launch of two roles it also claims the next list and opens its front, once all keys of the
// list before are computed with: while results are merged and written, and not earlier, since
// another CTA might compute the claimed list sooner.
#pragma once

#include <warploom/items/lists.cuh>
#include <warploom/items/merge.cuh>
#include <warploom/items/row_merges.cuh>
#include <warploom/items/stamp.cuh>
#include <warploom/portable/attend.cuh>

namespace warploom {

// Whether the CTA streams the keys of one list after another: decodes of launches of two roles.
template <class K>
struct StreamsLists {
  static constexpr bool kDoes = ClaimsLists<K>::kDoes && Sizes<K>::kSplitKeys;
};

// The item of a number in the CTA's sequence; facts and rows lie in one of Arena::kItems slots, in
// turn.
template <class K>
WL_FN Item<K> item_of(const typename K::Params& p, char* shared_memory, int number) {
  return {p, {shared_memory, number}};
}

// Opens the item at the front of a list, as Item::open does, and notes whether it is the last.
template <class K>
WL_FN void open_front(const Item<K>& item, const Opening<K>& opening, const List& list,
                      unsigned thread, unsigned threads) {
  if (thread == 0) item.arena.facts().ends_list = list.begin + 1 == list.end;
  item.open(opening, list.begin, thread, threads);
}

template <class K>
class PrefetchWarp {
  using C = typename K::Config;
  using Copy = RowCopy<C::kRows, C::kHeadDimQk, Sizes<K>::kDimQk, Sizes<K>::kBlock, kWarpSize>;

 public:
  // Prepares all items from item 0 on, which is the front of `list` and open. Before the barrier at
  // the beginning of an item it copies the item's queries and opens the next item of the list.
  WL_FN static void run(const typename K::Params& p, char* shared_memory, List list) {
    for (int number = 0; !list.is_empty(); ++number) {
      const Item<K> item = item_of<K>(p, shared_memory, number);
      const Item<K> next = item_of<K>(p, shared_memory, number + 1);
      copy_queries<Copy>(item, item.arena.queries(), lane());
      ++list.begin;
      if (!list.is_empty()) {
        open_front(next, load_opening<K>(p, list.begin), list, lane(), kWarpSize);
      }
      cute::cp_async_wait<0>();
      if constexpr (K::Variant::kHasQueryTransform) {
        __syncwarp();
        transform_queries<kWarpSize>(item, item.arena.queries(), lane());
      }
      K::template Arena<K>::sync_all();
      if constexpr (StreamsLists<K>::kDoes) {
        if (!list.is_empty()) continue;
        list = claim_and_open(next);
        K::template Arena<K>::sync_all();
      }
    }
  }

 private:
  WL_FN static unsigned lane() { return threadIdx.x % kWarpSize; }

  // Claims a list with items, and opens its front; an empty list if none is left.
  WL_FN static List claim_and_open(const Item<K>& item) {
    volatile auto& claims = claim_state_in<K>(item.arena.base);
    named_meet(kListEndBarrier, K::kTileThreads);
    while (true) {
      if (lane() == 0) claims.template claim_decodes<K>(item.p, 0);
      __syncwarp();
      const unsigned number = claims.list(0);
      if (number == kNoList) return {number, 0, 0};
      const List list = list_of<K>(item.p, number);
      const auto opening = load_first_opening<K>(item.p, number);  // waits for no other load
      __syncwarp();                                                // all lanes have read the number
      if (list.is_empty()) continue;
      open_front(item, opening, list, lane(), kWarpSize);
      __syncwarp();
      return list;
    }
  }
};

// The items of a list from `number` on, of which the first is open, by the threads that compute;
// returns the number behind the last.
template <class K>
WL_FN int stream_list(const typename K::Params& p, char* shared_memory, int number) {
  const Item<K> opened = item_of<K>(p, shared_memory, number);
  typename K::template Arena<K>::Pipeline pipeline(opened, number);
  pipeline.look_up();
  sync_group<K>();
  pipeline.start();
  bool is_last;
  do {
    K::template Arena<K>::sync_all();  // the prefetch warp is ready, and slabs are read
    const Item<K> item = item_of<K>(p, shared_memory, number);
    const Stamp<K> stamp(p, item.facts().index);
    typename WarpMma<K>::Output output = {};
    Softmax<K> softmax(softmax_factor<K>(p));
    pipeline.begin(number, item.facts().ends_list);
    attend(item, pipeline, softmax, output);
    is_last = item.facts().ends_list;
    if constexpr (StreamsLists<K>::kDoes) {
      if (is_last) named_arrive(kListEndBarrier, K::kTileThreads);
    }
    write_merged_rows(item, softmax, output);
    merge_if_last(item);
    ++number;
  } while (!is_last);
  pipeline.finish();
  return number;
}

// Whether the CTA has claimed another list.
template <class K>
WL_FN bool has_claimed(char* shared_memory) {
  if constexpr (StreamsLists<K>::kDoes) {
    K::template Arena<K>::sync_all();  // its front is open, or none is left
    return claim_state_in<K>(shared_memory).list(0) != kNoList;
  }
  return false;
}

// All items of a list that has some, and then of the lists that the CTA claims, by all threads of
// the tile.
template <class K>
WL_FN void stream_items(const typename K::Params& p, char* shared_memory, const Opening<K>& opening,
                        const List& list) {
  open_front(item_of<K>(p, shared_memory, 0), opening, list, threadIdx.x,
             Sizes<K>::kThreads + kWarpSize);
  K::template Arena<K>::sync_all();
  if (threadIdx.x >= Sizes<K>::kThreads) return PrefetchWarp<K>::run(p, shared_memory, list);
  int number = 0;
  do {
    number = stream_list<K>(p, shared_memory, number);
  } while (has_claimed<K>(shared_memory));
}

template <class K>
WL_FN void run_stream_kernel(const typename K::Params& p, char* shared_memory) {
  const List list = list_of<K>(p, blockIdx.x);
  const auto opening = load_first_opening<K>(p, list.number);
  if (!list.is_empty()) stream_items<K>(p, shared_memory, opening, list);
  if constexpr (K::Config::kComposed) {
    if (threadIdx.x < Sizes<K>::kThreads) merge_composed_rows(item_of<K>(p, shared_memory, 0));
  }
}

}  // namespace warploom
