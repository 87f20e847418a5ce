// Which lists of work items a CTA works through: its own list; in a launch of two roles its own
// prefill list, then shared lists, which any CTA may claim, until none is left.
#pragma once

#include <warploom/hopper/arrivals.cuh>
#include <warploom/items/lists.cuh>

namespace warploom::hopper {

// Warps meet at barriers from several places in the code (named_meet).

// The threads that draw the lists that a CTA claims: those that open items and issue copies of
// keys, once they have issued all copies of keys of the list before. So the next list is opened
// while the last tiles are in flight or computed with, and no CTA holds a claimed list for longer
// than that. Numbers of drawn lists go to two places in turn.
struct ListClaimers {
  // With tensor copies one warp copies only values; it does not draw (see ListFollowers).
  template <class K>
  static constexpr int kThreads = kProducerThreads - (K::Config::kBulk ? kWarpSize : 0);

  template <class K>
  WL_FN static unsigned next_list(const typename K::Params& p, Shared<K> shared, int draw) {
    constexpr unsigned kConsumers = Sizes<K>::kThreads;
    const int place = draw % 2;
    // The place is free once the other threads have read the list that was drawn into it before;
    // they read it when they begin that list.
    if (draw >= 2) named_meet(kListReadBarrier + place, kConsumers + kProducerThreads);
    if (threadIdx.x == kConsumers) shared.claim_state().template claim_prefills<K>(p, place);
    named_meet(kListBarrier, kThreads<K>);
    __syncwarp();  // the claiming thread rejoins its warp, as the next call requires
    named_arrive(kListDrawnBarrier + place, kConsumers + kProducerThreads);
    return shared.claim_state().list(place);
  }
};

// The threads that learn which list was drawn: consumers, and the warp that copies values.
struct ListFollowers {
  template <class K>
  WL_FN static unsigned next_list(const typename K::Params&, Shared<K> shared, int draw) {
    constexpr unsigned kConsumers = Sizes<K>::kThreads;
    const int place = draw % 2;
    named_meet(kListDrawnBarrier + place, kConsumers + kProducerThreads);
    const unsigned list = shared.claim_state().list(place);
    named_arrive(kListReadBarrier + place, kConsumers + kProducerThreads);
    return list;
  }
};

// Calls work(list) for one list after another; all threads of a side (ListClaimers or
// ListFollowers) call this.
template <class Side, class K, class Work>
WL_FN void for_each_list(const typename K::Params& p, Shared<K> shared, const Work& work) {
  if constexpr (!ClaimsLists<K>::kDoes) {
    work(list_of<K>(p, blockIdx.x));
  } else {
    static_assert(!kHasTransformer<K>, "nobody tells a group that transforms");
    // Only the count of draws is kept in registers while a list is worked through.
    unsigned list = shared.claim_state().cta();
#pragma unroll 1
    for (int draw = 0;; ++draw) {
      work(list_of<K>(p, list));
      if (!shared.claim_state().claims_prefills()) return;
      list = Side::next_list(p, shared, draw);
      if (list == kNoList) return;
    }
  }
}

}  // namespace warploom::hopper
