// Which lists of work items a CTA goes through: its own, or, in a launch of two roles, its own of
// prefill and then those that any CTA may claim, until none is left.
#pragma once

#include <warploom/hopper/arrivals.cuh>
#include <warploom/items/lists.cuh>

namespace warploom::hopper {

// Warps meet at barriers from several places in the code (named_meet).

// Who draws the lists that a CTA claims: the threads that open items and ask for keys, when they
// have asked for all keys of the list before. So the next is opened while the last tiles are on
// their way or computed with, and no CTA holds a list for longer than that. What is drawn has two
// places, by turns.
struct Drawers {
  // With tensor copies a warp asks for values alone, and is told.
  template <class K>
  static constexpr int kThreads = kProducerThreads - (K::Config::kBulk ? kWarpSize : 0);

  template <class K>
  WL_FN static unsigned next_list(const typename K::Params& p, Shared<K> shared, int draw) {
    constexpr unsigned kConsumers = Sizes<K>::kThreads;
    const int place = draw % 2;
    // The place is free once the others have read what was drawn there before, as they do when they
    // come to that list.
    if (draw >= 2) named_meet(kListReadBarrier + place, kConsumers + kProducerThreads);
    if (threadIdx.x == kConsumers) shared.drawn().template claim_prefills<K>(p, place);
    named_meet(kListBarrier, kThreads<K>);
    __syncwarp();  // who claimed has come back to its warp, as the next asks
    named_arrive(kListDrawnBarrier + place, kConsumers + kProducerThreads);
    return shared.drawn().list(place);
  }
};

// Those that compute, and who asks for values, are told.
struct Told {
  template <class K>
  WL_FN static unsigned next_list(const typename K::Params&, Shared<K> shared, int draw) {
    constexpr unsigned kConsumers = Sizes<K>::kThreads;
    const int place = draw % 2;
    named_meet(kListDrawnBarrier + place, kConsumers + kProducerThreads);
    const unsigned list = shared.drawn().list(place);
    named_arrive(kListReadBarrier + place, kConsumers + kProducerThreads);
    return list;
  }
};

// Does work(list) for one list after another, by all threads of a side.
template <class Side, class K, class Work>
WL_FN void for_each_list(const typename K::Params& p, Shared<K> shared, const Work& work) {
  if constexpr (!ClaimsLists<K>::kDoes) {
    work(list_of<K>(p, blockIdx.x));
  } else {
    static_assert(!kHasTransformer<K>, "nobody tells a group that transforms");
    // Only the count of draws is kept in registers while a list is worked through.
    unsigned list = shared.drawn().cta();
#pragma unroll 1
    for (int draw = 0;; ++draw) {
      work(list_of<K>(p, list));
      if (!shared.drawn().claims_prefills()) return;
      list = Side::next_list(p, shared, draw);
      if (list == kNoList) return;
    }
  }
}

}  // namespace warploom::hopper
