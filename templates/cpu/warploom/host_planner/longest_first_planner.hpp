// Plans a batch by dealing its tiles to CTAs, the longest first.
#pragma once

#include <warploom/host_planner/dealing.hpp>
#include <warploom/planner/planner.hpp>

namespace warploom {

template <class K, class Team>
class LongestFirstPlanner : public PlannerBase<K, Team, LongestFirstPlanner<K, Team>> {
  using Params = typename K::Params;
  using Base = PlannerBase<K, Team, LongestFirstPlanner<K, Team>>;
  friend Base;

 public:
  WL_FN LongestFirstPlanner(const Params& p, Team& team, char* memory)
      : Base(p, team),
        tiles_(p, shape_of_all(p), team, memory),
        dealing_(p, tiles_, team, tiles_.scratch_end()) {}

 private:
  using Base::p_, Base::team_;

  WL_FN PlanStatus count_tiles() { return tiles_.template count_tiles<false>(); }

  WL_FN void assign() {
    if (tiles_.tiles() == 0) return;
    tiles_.count_visible();
    dealing_.assign(/* leaves_some */ false);
  }

  WL_FN void write_header(PlanStatus status) {
    const bool has_items = status == PlanStatus::kGood && tiles_.tiles() > 0;
    const PlanTotals totals = has_items ? dealing_.totals() : PlanTotals{0, 0, 0};
    *reinterpret_cast<typename K::PlanHeader*>(p_.header) = this->header(status, totals);
    const int idle = has_items ? dealing_.lists().own : 0;  // the first CTA without work
    if (has_items) dealing_.write_indptr(0, 0, {});
    this->fill_indptr(idle, p_.num_ctas + 1, totals.items);
  }

  WL_FN void write_items() {
    if (tiles_.tiles() > 0) dealing_.write_items(0, 0);
  }

  RolePlan<K, Team> tiles_;
  Dealing<K, Team> dealing_;
};

}  // namespace warploom
