// Plans a batch of two roles whose prefills may be dealt the longest first:
// scheduler/partition/dealt_prefills.py.
#pragma once

#include <warploom/host_planner/dealing.hpp>
#include <warploom/planner/role_planner.hpp>

namespace warploom {

// Prefills on a line, or dealt to CTAs. `RolePlanner` knows this type, so nothing is virtual.
template <class K, class Team>
class DealtPrefills : public RolePlan<K, Team> {
  using Base = RolePlan<K, Team>;
  using Params = typename K::Params;

 public:
  WL_FN DealtPrefills(const Params& p, const RoleShape& shape, Team& team, char* memory)
      : Base(p, shape, team, memory),
        own_lists_(shape.own_lists),
        shared_lists_(shape.shared_lists),
        params_(for_dealing(p)),
        dealing_(params_, *this, team, Base::scratch_end()) {}
  DealtPrefills(const DealtPrefills&) = delete;  // members refer to this object

  WL_FN char* scratch_end() const { return dealing_.scratch_end(); }

  WL_FN void partition_prefills(Line<Params, Team>& line, int ctas, bool is_alone) {
    if (is_alone || are_dealt(line, ctas)) {
      params_.active_ctas = ctas;
      dealing_.assign(/* leaves_some */ !is_alone);
      is_dealt_ = true;
    } else {
      Base::partition_prefills(line, ctas, is_alone);
    }
  }

  WL_FN PlanTotals totals() const { return is_dealt_ ? dealing_.totals() : Base::totals(); }
  WL_FN OwnAndShared lists() const { return is_dealt_ ? dealing_.lists() : Base::lists(); }
  WL_FN int own_items() const { return is_dealt_ ? dealing_.own_items() : Base::own_items(); }

  WL_FN void write_indptr(const Offsets& offsets) {
    if (!is_dealt_) return Base::write_indptr(offsets);
    dealing_.write_indptr(own_lists_ + offsets.cta, shared_lists_, offsets);
  }
  WL_FN void write_items(const Offsets& offsets) {
    if (!is_dealt_) return Base::write_items(offsets);
    dealing_.write_items(own_lists_ + offsets.cta, shared_lists_);
  }

 private:
  // The parameters with the costs of items that are dealt.
  WL_FN static Params for_dealing(const Params& p) {
    Params dealt = p;
    dealt.fixed = p.deal_cost_fixed, dealt.per_tile = p.deal_cost_per_tile;
    dealt.grain = p.deal_cost_grain, dealt.partial = p.deal_cost_partial;
    return dealt;
  }
  // Whether prefills beside decodes are dealt (decision 0062).
  WL_FN bool are_dealt(const Line<Params, Team>& line, int ctas) const {
    if (params_.deals_beside_decodes == 0) return false;
    if (ctas < kFewestDealers || line.items() > kMostDealtPerCta * ctas) return false;
    const bool is_better = params_.group_size >= kSmallestGroup || !line.has_all_rounds(ctas);
    return is_better && !line.is_short(ctas);
  }

  int own_lists_, shared_lists_;  // the first list of each kind
  Params params_;
  Dealing<K, Team> dealing_;
  bool is_dealt_ = false;
};

template <class K, class Team>
using DealingRolePlanner = RolePlanner<K, Team, DealtPrefills<K, Team>>;

}  // namespace warploom
