// The lists of work items that a plan has, and those that any CTA may claim.
#pragma once

#include <warploom/qualifiers.cuh>

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

// Draws the number of a shared list, at least num_shared if there is none left. Each CTA draws one
// such number: who draws the last of them leaves the counter at zero for the next launch.
template <class Header>
WL_FN unsigned claim_list(volatile Header& header) {
  auto* claimed = reinterpret_cast<unsigned*>(const_cast<int*>(&header.claimed));
  const unsigned drawn = atomicAdd(claimed, 1u);
  if (drawn == unsigned(header.num_shared + header.num_active) - 1) *claimed = 0;
  return drawn;
}

}  // namespace warploom
