// The group that transforms staged queries, keys and values in place, between the copies and the
// products: consumers multiply while the next tile is transformed.
#pragma once

#include <warploom/hopper/absent.cuh>
#include <warploom/hopper/producer.cuh>
#include <warploom/vector_seats.cuh>

namespace warploom::hopper {

template <class K>
class Transformer {
  using C = typename K::Config;
  using Variant = typename K::Variant;
  static constexpr int kThreads = 128;
  // Rows that a thread has under way: as many as registers hold.
  template <class Seat>
  static constexpr int kBatch = LaneStates<Seat, K>::kPanels <= 2 ? 2 : 1;

 public:
  WL_FN explicit Transformer(Shared<K> shared)
      : shared_(shared), barriers_(shared.barriers()), thread_(threadIdx.x % kThreads) {}

  WL_FN void run(const typename K::Params& p) {
    OpenedItems<K> items{p, shared_};
    const int end = __ldg(p.cta_indptr + blockIdx.x + 1);
    for (int i = __ldg(p.cta_indptr + blockIdx.x); i < end; ++i) {
      const Item<K> item = items.next();
      if constexpr (Shared<K>::kLandsQueries) take_queries(item);
      if constexpr (Shared<K>::kLandsKeys || Shared<K>::kLandsValues) walk_keys(item);
      sync();  // nobody looks at the item any more
      if (thread_ == 0) barrier_arrive(&barriers_.item_empty[item.arena.item_stage]);
    }
  }

 private:
  WL_FN void take_queries(const Item<K>& item) {
    barrier_wait(&barriers_.q_landed[query_ring_.stage], query_ring_.phase);
    transform_queries<kThreads>(item, shared_.queries(query_ring_.stage), thread_);
    publish(barriers_.q_full[query_ring_.stage]);
    query_ring_.advance();
  }

  WL_FN void walk_keys(const Item<K>& item) {
    const LaneStates<KeySeat<K>, K> key_lanes(item, thread_);
    const LaneStates<ValueSeat<K>, K> value_lanes(item, thread_);
    KeyWalk<K> walk(item, 0);
    for (Visit visit = walk.next(); visit.begin() < item.facts().places.end; visit = walk.next()) {
      const Columns<K> columns{item, visit, shared_.positions(slot_)};
      if constexpr (Shared<K>::kLandsKeys) {
        barrier_wait(&barriers_.k_landed[ring_.stage], ring_.phase);
        if constexpr (Variant::kHasKeyTransform) {
          transform_rows<KeySeat<K>, KeyTile<K>, C::kKeys, kThreads, kBatch<KeySeat<K>>>(
              item, key_lanes, shared_.keys(ring_.stage), thread_, columns);
        }
        publish(barriers_.k_full[ring_.stage]);
      }
      if constexpr (Variant::kHasValueTransform) take_values(item, value_lanes, columns, visit);
      slot_ = next_slot<K>(slot_);
      ring_.advance();
    }
  }

  WL_FN void take_values(const Item<K>& item, const LaneStates<ValueSeat<K>, K>& lanes,
                         const Columns<K>& columns, const Visit& visit) {
    barrier_wait(&barriers_.v_landed[ring_.stage], ring_.phase);
    typename C::Element* staged = shared_.values(ring_.stage);
    if (leaves_garbage(columns, visit)) clear_absent(columns, staged);
    transform_rows<ValueSeat<K>, ValueTile<K>, C::kKeys, kThreads, kBatch<ValueSeat<K>>>(
        item, lanes, staged, thread_, columns);
    publish(barriers_.v_full[ring_.stage]);
  }

  // What ordinary instructions wrote to shared memory, the tensor cores may read now.
  WL_FN void publish(Barrier& full) const {
    fence_async_proxy();
    sync();
    if (thread_ == 0) barrier_arrive(&full);
  }
  WL_FN static void sync() { named_sync(kTransformBarrier, kThreads); }

  Shared<K> shared_;
  typename Shared<K>::Barriers& barriers_;
  unsigned thread_;
  Ring<C::kQueryStages> query_ring_;
  Ring<C::kStages> ring_;
  int slot_ = 0;
};

}  // namespace warploom::hopper
