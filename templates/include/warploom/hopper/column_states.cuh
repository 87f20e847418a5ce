// Per-key state of hooks on logits (`Variant::ColState`), computed ahead of the consumers and
// stored beside the keys.
#pragma once

#include <warploom/hopper/arrivals.cuh>
#include <warploom/hopper/shared.cuh>
#include <warploom/staging/gather.cuh>

namespace warploom::hopper {

// Computes the per-key state of hooks on logits; run by the two warps that copy queries.
template <class K>
class ColumnProducer {
  using C = typename K::Config;
  using Variant = typename K::Variant;
  static constexpr int kOwn = (C::kKeys + kBulkQueryThreads - 1) / kBulkQueryThreads;  // keys

 public:
  WL_FN void produce(const Item<K>& item, unsigned thread) {
    auto& barriers = item.arena.barriers();
    const auto of_tile = Variant::tile_state(item.p, item.tile());
    KeyWalk<K> walk(item, 0);
    for (Visit visit = walk.next(); visit.exists(); visit = walk.next()) {
      // Loads are issued before the wait for room.
      const bool is_read = Variant::kHasLogitsTransform || !visit.is_full();
      typename Variant::ColState states[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int key = thread + i * kBulkQueryThreads;
        if (is_read && key < C::kKeys) {
          states[i] = Variant::col_state(item.p, item.tile(), of_tile, position(item, visit, key));
        }
      }
      barrier_wait(&barriers.k_empty[ring_.stage], ring_.phase ^ 1);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int key = thread + i * kBulkQueryThreads;
        if (is_read && key < C::kKeys) item.arena.column_states(slot_)[key] = states[i];
      }
      barrier_arrive(&barriers.k_full[ring_.stage]);
      slot_ = next_slot<K>(slot_);
      ring_.advance();
    }
  }

 private:
  WL_FN static int position(const Item<K>& item, const Visit& visit, int key) {
    if constexpr (C::kColumnPositions) return listed_position(item, visit.begin() + key);
    return item.facts().kv_pos + visit.begin() + key;
  }

  Ring<C::kStages> ring_;
  int slot_ = 0;
};

}  // namespace warploom::hopper
