// Which lists of work items a CTA goes through: its own, or, in a launch of two roles, its own of
// prefill and then those that any CTA may claim, until none is left.
#pragma once

#include <warploom/hopper/arrivals.cuh>
#include <warploom/items/lists.cuh>

namespace warploom::hopper {

// Who draws the lists that a CTA claims: the producer's threads, when they have asked for all keys
// of the list before. So the next is opened while the last keys are computed with, and no CTA holds
// a list for longer than that. What is drawn has two places, by turns.
struct Producers {
  template <class K>
  WL_FN static unsigned next_list(const typename K::Params& p, Shared<K> shared, int draw) {
    constexpr unsigned kConsumers = Sizes<K>::kThreads;
    volatile unsigned& drawn = shared.drawn().lists[draw % 2];
    // The place is free: consumers have read what was drawn before the last one. They did so when
    // they came to that list, so nobody waits.
    if (draw >= 2) named_sync(kListReadBarrier + draw % 2, kConsumers + kProducerThreads);
    if (threadIdx.x == kConsumers) drawn = claim_prefills(header_of<K>(p));
    named_sync(kListBarrier, kProducerThreads);
    named_arrive(kListDrawnBarrier + draw % 2, kConsumers + kProducerThreads);
    return drawn;
  }
};

// Those that compute are told.
struct Consumers {
  template <class K>
  WL_FN static unsigned next_list(const typename K::Params&, Shared<K> shared, int draw) {
    constexpr unsigned kConsumers = Sizes<K>::kThreads;
    named_sync(kListDrawnBarrier + draw % 2, kConsumers + kProducerThreads);
    const unsigned number = shared.drawn().lists[draw % 2];
    named_arrive(kListReadBarrier + draw % 2, kConsumers + kProducerThreads);
    return number;
  }
};

// Does work(list) for one list after another, by all threads of the producer or by all that
// compute.
template <class Side, class K, class Work>
WL_FN void for_each_list(const typename K::Params& p, Shared<K> shared, const Work& work) {
  if constexpr (!ClaimsLists<K>::kDoes) {
    work(list_of<K>(p, blockIdx.x));
  } else {
    static_assert(!kHasTransformer<K>, "nobody tells a group that transforms");
    // Only the count of draws is kept in registers while a list is worked through, and nothing is
    // read before it is needed.
    volatile auto& header = header_of<K>(p);
    unsigned list = shared.drawn().cta;
#pragma unroll 1
    for (int draw = 0;; ++draw) {
      work(list_of<K>(p, list));
      if (header.num_shared == 0 || shared.drawn().cta >= header.num_active) return;
      const unsigned number = Side::next_list(p, shared, draw);
      if (number >= header.num_shared) return;
      list = kSharedPrefills * gridDim.x + number;
    }
  }
}

}  // namespace warploom::hopper
