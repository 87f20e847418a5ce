// The lists of work items of a plan, and how CTAs claim shared ones.
#pragma once

#include <warploom/device/qualifiers.cuh>

namespace warploom {

struct List {
  unsigned number;
  int begin, end;  // items

  WL_FN bool is_empty() const { return begin == end; }
};

constexpr unsigned kNoList = 0xffffffffu;

template <class K>
WL_FN List list_of(const typename K::Params& p, unsigned number) {
  return {number, __ldg(p.cta_indptr + number), __ldg(p.cta_indptr + number + 1)};
}

// The plan's header: facts about its lists, and counters that each launch leaves at zero.
template <class K>
WL_FN typename K::PlanHeader& header_of(const typename K::Params& p) {
  return *reinterpret_cast<typename K::PlanHeader*>(const_cast<int*>(p.header));
}

// Whether CTAs claim lists: in launches of two roles.
template <class K, class = void>
struct ClaimsLists {
  static constexpr bool kDoes = false;
};
template <class K>
struct ClaimsLists<K, decltype(void(&K::PlanHeader::num_shared_prefills))> {
  static constexpr bool kDoes = true;
};

// The number of a role's shared lists, and of CTAs (the first ones) that may claim them.
struct Claims {
  unsigned lists, ctas;
};

// What a CTA of a launch of two roles keeps in shared memory: its number in the plan, what it may
// claim, and the lists that it drew, of prefills in two places in turn. So the plan's header is
// read once, and no thread waits for it between two lists.
class ClaimState {
 public:
  // Set what the plan's header says, and which CTA of the plan this one is; called by one thread
  // before other threads read anything here.
  template <class Header>
  WL_FN void read(const Header& header) volatile {
    prefills_.lists = header.num_shared_prefills, prefills_.ctas = header.num_active;
    decodes_.lists = header.num_shared_decodes, decodes_.ctas = header.num_decode_ctas;
  }
  WL_FN void set_cta(unsigned cta) volatile { cta_ = cta; }

  WL_FN unsigned cta() const volatile { return cta_; }
  // Whether this CTA has decodes of its own.
  WL_FN bool has_decodes() const volatile { return cta_ < decodes_.ctas; }
  WL_FN bool claims_prefills() const volatile { return may_claim(prefills_); }
  WL_FN bool claims_decodes() const volatile { return may_claim(decodes_); }
  // Draws a list into one of two places; by one thread. A CTA that may claim no decodes draws
  // kNoList, too.
  template <class K>
  WL_FN void claim_prefills(const typename K::Params& p, int place) volatile {
    lists_[place] = claim(header_of<K>(p).claimed, prefills_, K::PlanHeader::kSharedPrefills);
  }
  template <class K>
  WL_FN void claim_decodes(const typename K::Params& p, int place) volatile {
    const bool may = claims_decodes();
    lists_[place] =
        may ? claim(header_of<K>(p).claimed_decodes, decodes_, K::PlanHeader::kSharedDecodes)
            : kNoList;
  }
  // The number of the list that was drawn into a place, or kNoList.
  WL_FN unsigned list(int place) const volatile { return lists_[place]; }

 private:
  WL_FN bool may_claim(const volatile Claims& claims) const volatile {
    return claims.lists > 0 && cta_ < claims.ctas;
  }
  // Claims one of a role's shared lists; kNoList if none is left. Each CTA that may claim gets
  // kNoList once; the last CTA to get it leaves the counter at zero for the next launch.
  WL_FN static unsigned claim(int& counter, const volatile Claims& claims, int kind) {
    auto* claimed = reinterpret_cast<unsigned*>(&counter);
    const unsigned lists = claims.lists, drawn = atomicAdd(claimed, 1u);
    if (drawn == lists + claims.ctas - 1) *claimed = 0;
    return drawn < lists ? kind * gridDim.x + drawn : kNoList;
  }

  unsigned cta_;
  Claims prefills_, decodes_;
  unsigned lists_[2];
};

// The ClaimState of this CTA, behind the shared memory of either role.
template <class K>
WL_FN volatile ClaimState& claim_state_in(char* shared_memory) {
  static_assert(sizeof(ClaimState) <= K::kDrawnBytes, "shared memory has room for them");
  return *reinterpret_cast<volatile ClaimState*>(shared_memory + K::kDrawnAt);
}

}  // namespace warploom
