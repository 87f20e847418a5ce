// The producer warpgroup, which works ahead of the consumers, and what each of its warps does.
//
// Bulk mode (storage in blocks of 8 tokens and more, or affine): one warp issues tensor copies of
// keys, one those of values, and two open items and gather queries. These two do not wait for room
// for keys, so that the next item is open long before it is needed, unless they also compute the
// per-key state of hooks on logits. Gather mode (smaller blocks): all four warps do everything
// together.
#pragma once

#include <warploom/hopper/bulk_copies.cuh>
#include <warploom/hopper/column_states.cuh>
#include <warploom/hopper/gathered_copies.cuh>
#include <warploom/hopper/items.cuh>
#include <warploom/hopper/query_copies.cuh>

namespace warploom::hopper {

// Copies keys or values of the items that other warps open; run by one warp.
template <bool kOfValues, class K>
WL_FN void produce_in_bulk(const typename K::Params& p, Shared<K> shared) {
  BulkProducer<K, kOfValues> tokens;
  OpenedItems<K> opened{p, shared};
  for_each_list<cute::conditional_t<kOfValues, ListFollowers, ListClaimers>>(
      p, shared, [&](const List& list) {
        for (int items = list.end - list.begin; items > 0; --items) {
          const Item<K> item = opened.next();
          tokens.copy(item);
          barrier_arrive_warp(&shared.barriers().item_empty[item.arena.item_stage]);
        }
      });
}

template <class K>
WL_FN void produce(const typename K::Params& p, Shared<K> shared) {
  const unsigned thread = threadIdx.x % kProducerThreads;
  constexpr int kDraw = K::Config::kBulk ? kWarpSize + kBulkQueryThreads : kProducerThreads;
  static_assert(kDraw == ListClaimers::kThreads<K>,
                "barriers of lists count who comes to them below");
  if constexpr (!K::Config::kBulk) {
    ItemOpener<K, kProducerThreads> items;
    QueryProducer<K, kProducerThreads> queries;
    GatherProducer<K> tokens;
    for_each_list<ListClaimers>(p, shared, [&](const List& list) {
      items.begin(p, list);
      while (items.has_next()) {
        const Item<K> item = items.open_next(p, shared, thread);
        queries.copy(item, thread);
        tokens.copy(item, thread);
      }
    });
  } else if (thread < kWarpSize) {
    produce_in_bulk<false>(p, shared);
  } else if (thread < 2 * kWarpSize) {
    produce_in_bulk<true>(p, shared);
  } else {
    ItemOpener<K, kBulkQueryThreads> items;
    QueryProducer<K, kBulkQueryThreads> queries;
    ColumnProducer<K> columns;
    for_each_list<ListClaimers>(p, shared, [&](const List& list) {
      items.begin(p, list);
      while (items.has_next()) {
        const Item<K> item = items.open_next(p, shared, thread - 2 * kWarpSize);
        queries.copy(item, thread - 2 * kWarpSize);
        if constexpr (Shared<K>::kStagesColumns) columns.produce(item, thread - 2 * kWarpSize);
      }
    });
  }
}

}  // namespace warploom::hopper
