// Which lists of work items a CTA goes through: its own, or, in a launch of two roles, its own of
// prefill and then those that any CTA may claim, until none is left.
#pragma once

#include <warploom/hopper/shared.cuh>
#include <warploom/lists.cuh>

namespace warploom::hopper {

template <class K, class = void>
struct ClaimsLists {
  static constexpr bool kDoes = false;
};
template <class K>
struct ClaimsLists<K, decltype(void(&K::PlanHeader::num_shared))> {
  static constexpr bool kDoes = true;
};

// Does work(list) for one list after another; all threads of the CTA go through the same ones. A
// thread of the producer, which is done first, draws the next while others compute. It is never
// two lists ahead of another thread, so that two places for what it drew are enough.
template <class K, class Work>
WL_FN void for_each_list(const typename K::Params& p, Shared<K> shared, const Work& work) {
  if constexpr (!ClaimsLists<K>::kDoes) {
    work(list_of<K>(p, blockIdx.x));
  } else {
    // Nothing is kept in registers while a list is worked through, nor read before it is needed.
    volatile auto& header = header_of<K>(p);
    work(list_of<K>(p, shared.drawn().cta));
    if (header.num_shared == 0 || shared.drawn().cta >= header.num_active) return;
#pragma unroll 1
    for (int turn = 0;; turn ^= 1) {
      volatile unsigned& drawn = shared.drawn().lists[turn];
      if (threadIdx.x == Sizes<K>::kThreads) drawn = claim_prefills(header);
      named_sync(kListBarrier, K::kCtaThreads);
      const unsigned number = drawn;
      if (number >= header.num_shared) return;
      work(list_of<K>(p, kSharedPrefills * gridDim.x + number));
    }
  }
}

}  // namespace warploom::hopper
