// The lists of work items that a plan has, and those that CTAs may claim.
#pragma once

#include <warploom/device/qualifiers.cuh>
#include <warploom/role_lists.hpp>

namespace warploom {

struct List {
  unsigned number;
  int begin, end;  // items
};

template <class K>
WL_FN List list_of(const typename K::Params& p, unsigned number) {
  return {number, __ldg(p.cta_indptr + number), __ldg(p.cta_indptr + number + 1)};
}

// What a plan says of its lists, and the counters that launches leave at zero. Read anew each time.
template <class K>
WL_FN volatile typename K::PlanHeader& header_of(const typename K::Params& p) {
  return *reinterpret_cast<volatile typename K::PlanHeader*>(const_cast<int*>(p.header));
}

// Whether CTAs claim lists: in launches of two roles.
template <class K, class = void>
struct ClaimsLists {
  static constexpr bool kDoes = false;
};
template <class K>
struct ClaimsLists<K, decltype(void(&K::PlanHeader::num_shared))> {
  static constexpr bool kDoes = true;
};

// Numbers that a CTA drew in a launch of two roles: its own, and those of shared lists by turns.
struct Drawn {
  unsigned cta, lists[2];
};
static_assert(sizeof(Drawn) <= 16, "codegen/attention/two_roles.py has room for them");

// Draws the number of a list, at least `lists` if there is none left. Each of so many CTAs draws
// one such number: who draws the last of them leaves the counter at zero for the next launch.
WL_FN unsigned claim(volatile int& counter, int lists, int ctas) {
  auto* claimed = reinterpret_cast<unsigned*>(const_cast<int*>(&counter));
  const unsigned drawn = atomicAdd(claimed, 1u);
  if (drawn == unsigned(lists + ctas) - 1) *claimed = 0;
  return drawn;
}
template <class Header>
WL_FN unsigned claim_prefills(volatile Header& header) {
  return claim(header.claimed, header.num_shared, header.num_active);
}
template <class Header>
WL_FN unsigned claim_decodes(volatile Header& header) {
  return claim(header.claimed_decodes, header.num_shared_decodes, header.num_decodes);
}

}  // namespace warploom
