// The warpgroup that transforms staged queries, keys and values in place, or widens those of 8
// bits, between the copies and the products: consumers multiply while the next tile is transformed.
#pragma once

#include <warploom/hooks/sine_recurrence.cuh>
#include <warploom/hopper/absent.cuh>
#include <warploom/hopper/hook_lanes.cuh>
#include <warploom/hopper/items.cuh>

namespace warploom::hopper {

template <class K>
class Transformer {
  using C = typename K::Config;
  using Variant = typename K::Variant;
  static constexpr int kThreads = 128;
  // Rows that a thread has under way: as many as registers hold.
  template <class Hook>
  static constexpr int kBatch = HookLanes<Hook, K>::kPanels <= 2 && Hook::kReductions <= 1 ? 2 : 1;
  // State that is kept for as long as a work item lasts.
  template <class Hook, class Tile>
  using Kept = cute::conditional_t<has_sine_recurrence<Hook, K>(),
                                   RecurrentRows<Hook, Tile, C::kKeys, kThreads, K>,
                                   typename HookLanes<Hook, K>::States>;
  template <class Of>
  using KeptOf = Kept<typename Of::Hook, typename Of::Wide>;
  using KeptOfKeys = KeptOf<KeyStaging<K>>;
  using KeptOfValues = KeptOf<ValueStaging<K>>;

 public:
  WL_FN explicit Transformer(Shared<K> shared)
      : shared_(shared), barriers_(shared.barriers()), thread_(threadIdx.x % kThreads) {}

  WL_FN void run(const typename K::Params& p) {
    OpenedItems<K> items{p, shared_};
    const List list = list_of<K>(p, blockIdx.x);
    for (int i = list.begin; i < list.end; ++i) {
      const Item<K> item = items.next();
      thread_ = unknown_thread(thread_);
      if constexpr (Shared<K>::kTwoPhaseQueries) take_queries(item);
      if constexpr (Shared<K>::kTwoPhaseKeys || Shared<K>::kTwoPhaseValues) walk_keys(item);
      barrier_arrive_warp(&barriers_.item_empty[item.arena.item_stage]);
    }
  }

 private:
  WL_FN void take_queries(const Item<K>& item) {
    barrier_wait(&barriers_.q_landed[query_ring_.stage], query_ring_.phase);
    transform_queries<kThreads>(item, shared_.queries(query_ring_.stage), thread_);
    barrier_publish(&barriers_.q_full[query_ring_.stage]);
    query_ring_.advance();
  }

  WL_FN void walk_keys(const Item<K>& item) {
    const KeptOfKeys of_keys(item, thread_);
    const KeptOfValues of_values(item, thread_);
    KeyWalk<K> walk(item, 0);
    for (Visit visit = walk.next(); visit.exists(); visit = walk.next()) {
      const Columns<K> columns{item, visit, shared_.positions(slot_)};
      if constexpr (Shared<K>::kTwoPhaseKeys) {
        barrier_wait(&barriers_.k_landed[ring_.stage], ring_.phase);
        if constexpr (KeyStaging<K>::kChanges) {
          change<KeyStaging<K>>(item, of_keys, shared_.keys(ring_.stage), columns);
        }
        barrier_publish(&barriers_.k_full[ring_.stage]);
      }
      if constexpr (ValueStaging<K>::kChanges) take_values(item, of_values, columns, visit);
      slot_ = next_slot<K>(slot_);
      ring_.advance();
    }
  }

  template <class Of>
  WL_FN void change(const Item<K>& item, const KeptOf<Of>& kept, typename C::Element* staged,
                    const Columns<K>& columns) const {
    using Hook = typename Of::Hook;
    if constexpr (!Of::kTransforms) {
      widen_staged<Of, kThreads, C>(staged, thread_, columns);
    } else if constexpr (has_sine_recurrence<Hook, K>()) {
      static_assert(!Of::kWidens, "as Hopper.has_sine_recurrence says");
      kept.transform(staged, columns);
    } else {
      transform_staged<Of, kThreads, kBatch<Hook>>(item, kept, staged, thread_, columns);
    }
  }

  WL_FN void take_values(const Item<K>& item, const KeptOfValues& of_values,
                         const Columns<K>& columns, const Visit& visit) {
    barrier_wait(&barriers_.v_landed[ring_.stage], ring_.phase);
    typename C::Element* staged = shared_.values(ring_.stage);
    if (!ValueStaging<K>::kWidens && leaves_garbage(columns, visit)) {
      clear_absent<kThreads>(columns, staged);
      sync();  // other threads read the absent rows, too
    }
    change<ValueStaging<K>>(item, of_values, staged, columns);
    barrier_publish(&barriers_.v_full[ring_.stage]);
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
