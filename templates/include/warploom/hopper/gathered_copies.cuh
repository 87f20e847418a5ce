// Keys and values by cp.async, from rows that lie anywhere: blocks of fewer than 8 tokens.
#pragma once

#include <warploom/hopper/arrivals.cuh>
#include <warploom/hopper/shared.cuh>
#include <warploom/staging/gather.cuh>

namespace warploom::hopper {

// Rows from anywhere, by cp.async; absent rows become zeros.
template <class K>
class GatherProducer {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Variant = typename K::Variant;
  using CopyKeys = RowCopy<C::kKeys, C::kHeadDimQk / S::kPerHalfword, S::kHalfwordsQk, S::kKvBlock,
                           kProducerThreads>;
  using CopyValues = RowCopy<C::kKeys, C::kHeadDimV / S::kPerHalfword, S::kHalfwordsV, S::kKvBlock,
                             kProducerThreads>;

 public:
  WL_FN void copy(const Item<K>& item, unsigned thread) {
    const auto& p = item.p;
    const Shared<K> shared = item.arena;
    auto& barriers = shared.barriers();
    const int row = CopyKeys::looked_up_row(thread);
    const auto of_tile = Variant::tile_state(p, item.tile());
    KeyWalk<K> walk(item, 0);
    Visit visit = walk.next().as_first();
    int block = block_of(item, visit.begin() + row);
    while (visit.exists()) {
      const Visit next = walk.next();
      const int next_block = block_of(item, next.begin() + row);  // looked up a tile ahead
      const int token = (visit.begin() + row) % C::kBlockKv, at = TokenSlots<C>::of(block);
      const int kv_pos = C::kColumnPositions ? (block < 0 ? -1 : block * C::kBlockKv + token)
                                             : item.facts().kv_pos + visit.begin() + row;
      typename Variant::ColState state;
      if constexpr (Shared<K>::kStagesColumns) {
        state = Variant::col_state(p, item.tile(), of_tile, kv_pos);
      }
      barrier_wait(&barriers.k_empty[ring_.stage], ring_.phase ^ 1);
      if (row < C::kKeys) {
        if constexpr (C::kColumnPositions) shared.positions(slot_)[row] = kv_pos;
        if constexpr (Shared<K>::kStagesColumns) shared.column_states(slot_)[row] = state;
      }
      if (thread == 0) barriers.visits[ring_.stage] = visit.before(next);
      slot_ = next_slot<K>(slot_);
      const ShuffledRows<CopyKeys> keys{offset(at, token, p.k_block_stride, p.k_token_stride),
                                        thread};
      CopyKeys::copy(halfwords(item.facts().keys) + CopyKeys::column(thread), keys,
                     halfwords(shared.landed_keys(ring_.stage)), thread);
      arrive(barriers.k_copied(ring_.stage));
      barrier_wait(&barriers.v_empty[ring_.stage], ring_.phase ^ 1);
      const ShuffledRows<CopyValues> values{offset(at, token, p.v_block_stride, p.v_token_stride),
                                            thread};
      CopyValues::copy(halfwords(item.facts().values) + CopyValues::column(thread), values,
                       halfwords(shared.landed_values(ring_.stage)), thread);
      arrive(barriers.v_copied(ring_.stage));
      ring_.advance();
      visit = next;
      block = next_block;
    }
  }

 private:
  // Offset of a token in halfwords; strides that matter are multiples of 16 bytes.
  WL_FN static long long offset(int block, int token, long long block_stride,
                                long long token_stride) {
    if (block < 0) return kAbsent;
    return (block * block_stride + token * token_stride) / S::kPerHalfword;
  }
  WL_FN static const half_t* halfwords(const void* row) { return static_cast<const half_t*>(row); }
  WL_FN static half_t* halfwords(typename C::Element* tile) {
    return reinterpret_cast<half_t*>(tile);
  }

  // Arrives twice: for the copies, when they are complete, and for ordinary stores.
  WL_FN static void arrive(Barrier* full) {
    arrive_after_copies(full);
    barrier_arrive(full);
  }

  Ring<C::kStages> ring_;
  int slot_ = 0;
};

}  // namespace warploom::hopper
