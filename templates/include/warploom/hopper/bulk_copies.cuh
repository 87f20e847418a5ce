// Keys and values by tensor copies (TMA), whose boxes are tiles or blocks of 8 tokens and more.
#pragma once

#include <warploom/hopper/shared.cuh>
#include <warploom/hopper/warp_walk.cuh>
#include <warploom/staging/gather.cuh>

namespace warploom::hopper {

// Tensor copies of keys or of values, issued by one warp: keys never wait for room for values.
template <class K, bool kOfValues>
class BulkProducer {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Element = typename C::Element;
  // Tokens of a box, as in the launch's tensor maps: a whole tile, or one block's part of it.
  static constexpr int kBoxTokens = C::kBoxTokens;
  static_assert(C::kKeys % kBoxTokens == 0 && kBoxTokens % 8 == 0,
                "a box begins on a whole swizzle pattern of 8 rows");
  static_assert(!C::kIndexed || C::kBlockKv % kBoxTokens == 0, "a box lies in one block");
  static_assert(C::kBoxRowBytes == 2 * S::kKvBlock, "a row of a box is one of a panel");

 public:
  WL_FN void copy(const Item<K>& item) {
    const int lane = threadIdx.x % kWarpSize, end = item.facts().places.end;
    const Shared<K> shared = item.arena;
    auto& barriers = shared.barriers();
    WarpWalk<K> walk(item);
    Visit next = walk.next().as_first();
    while (next.exists()) {
      const Visit visit = next;
      next = walk.next();
      const int boxes = (min(end - visit.begin(), C::kKeys) + kBoxTokens - 1) / kBoxTokens;
      if constexpr (kOfValues) {
        barrier_wait(&barriers.v_empty[ring_.stage], ring_.phase ^ 1);
        copy_tile<S::kHalfwordsV>(item, &item.p.v_map, barriers.v_copied(ring_.stage), visit, boxes,
                                  shared.landed_values(ring_.stage), lane);
      } else {
        barrier_wait(&barriers.k_empty[ring_.stage], ring_.phase ^ 1);
        if constexpr (C::kColumnPositions) write_positions(item, visit, lane);
        if (lane == 0) barriers.visits[ring_.stage] = visit.before(next);
        copy_tile<S::kHalfwordsQk>(item, &item.p.k_map, barriers.k_copied(ring_.stage), visit,
                                   boxes, shared.landed_keys(ring_.stage), lane);
      }
      ring_.advance();
    }
  }

 private:
  template <int kHalfwords>
  WL_FN static void copy_tile(const Item<K>& item, const void* map, Barrier* full,
                              const Visit& visit, int boxes, Element* to, int lane) {
    constexpr int kPanels = kHalfwords / S::kKvBlock;
    if (lane == 0) barrier_arrive_expect(full, boxes * kBoxTokens * kHalfwords * 2);
    __syncwarp();
    for (int i = lane; i < boxes * kPanels; i += kWarpSize) {
      const int panel = i % kPanels, box = i / kPanels;  // panels of a block lie side by side
      const int place = visit.begin() + box * kBoxTokens;
      int token = item.facts().kv_row + place, block = item.facts().kv_block;
      if constexpr (C::kIndexed) {
        block = __ldg(item.p.indices + item.facts().index_begin + place / C::kBlockKv);
        token = place % C::kBlockKv;
        if constexpr (C::kColumnPositions) {  // one sequence of tokens, not blocks with an edge
          token += item.facts().kv_row + block * C::kBlockKv;
          block = 0;
        }
      }
      Element* target = to + (panel * C::kKeys + box * kBoxTokens) * S::kKvBlock;
      tma_load(map, full, target, panel * S::kKvBlock * S::kPerHalfword, token, item.tile().kv_head,
               block);
    }
  }
  WL_FN void write_positions(const Item<K>& item, const Visit& visit, int lane) {
    for (int key = lane; key < C::kKeys; key += kWarpSize) {
      item.arena.positions(slot_)[key] = listed_position(item, visit.begin() + key);
    }
    slot_ = next_slot<K>(slot_);
    barrier_arrive(item.arena.barriers().k_copied(ring_.stage));
  }

  Ring<C::kStages> ring_;
  int slot_ = 0;
};

}  // namespace warploom::hopper
