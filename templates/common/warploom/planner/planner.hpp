// Plans a batch: the Stream-K partition of scheduler/partition/stream_k.py, by a team of threads (a
// host has a team of one). Every team computes where the line is cut; then all teams write the plan
// together. No team waits for another: the team that is last to have checked its share of the page
// numbers signs the plan, that is, writes its header and cta_indptr.
#pragma once

#include <warploom/planner/role_plan.hpp>

namespace warploom {

// The common part of planners for one role and for two: `Derived` counts tiles, assigns items,
// signs the plan and writes items.
template <class K, class Team, class Derived>
class PlannerBase {
  using Params = typename K::Params;
  using Segment = typename K::Segment;

 public:
  // Returns kGood or the batch's error; then the plan is empty, and its header has the error.
  WL_FN PlanStatus run() {
    PlanStatus status = self().count_tiles();
    if (status != PlanStatus::kGood) {
      if (team_.is_first_team()) self().write_header(status);
      return status;
    }
    team_.vote(write_blocks());
    self().assign();
    bool has_negative = false;  // whether any page is negative; only the last team knows
    const bool is_last = team_.is_last(has_negative);
    if (has_negative) status = PlanStatus::kPage;
    if (is_last) self().write_header(status);
    write_segments();
    self().write_items();
    return status;
  }

 protected:
  WL_FN PlannerBase(const Params& p, Team& team) : p_(p), team_(team) {}

  // The header, except for fields that only some kinds of plans have.
  WL_FN typename K::PlanHeader header(PlanStatus status, const PlanTotals& totals) const {
    typename K::PlanHeader header = {};
    header.num_items = totals.items;
    header.num_segments = status == PlanStatus::kGood ? p_.num_requests : 0;
    header.num_merges = totals.merges;
    header.num_slots = totals.slots;
    header.status = int(status);
    return header;
  }
  // Writes that lists begin, begin + 1, ..., end - 1 begin with this item.
  WL_FN void fill_indptr(int begin, int end, int item) const {
    team_.each(team_.range(end - begin), [&](int i) { p_.cta_indptr[begin + i] = item; });
  }

  const Params& p_;
  Team& team_;

 private:
  WL_FN Derived& self() { return static_cast<Derived&>(*this); }

  WL_FN void write_segments() {
    const Batch<Params> batch{p_};
    team_.each_of_all(p_.num_requests, [&](int r) {
      reinterpret_cast<Segment*>(p_.segments)[r] = batch.template segment<Segment>(r);
    });
  }

  // Copies page numbers; `kv_indptr` must be valid. True if this thread saw a negative page.
  WL_FN bool write_blocks() const {
    if (!Batch<Params>{p_}.is_paged() || p_.kv_indices == nullptr) return false;
    return team_.copy(p_.kv_indices, p_.indices, p_.kv_indptr[p_.num_requests]);
  }
};

// The planner for one role.
template <class K, class Team>
class Planner : public PlannerBase<K, Team, Planner<K, Team>> {
  using Params = typename K::Params;
  using Base = PlannerBase<K, Team, Planner<K, Team>>;
  friend Base;

 public:
  WL_FN Planner(const Params& p, Team& team, char* memory)
      : Base(p, team), plan_(p, shape_of_all(p), team, memory) {}

 private:
  using Base::p_, Base::team_;

  WL_FN PlanStatus count_tiles() { return plan_.template count_tiles<!Team::kIsHost>(); }

  // Computes the line and its cuts. Every team does so, since no team waits for another.
  WL_FN void assign() {
    if (plan_.tiles() == 0) return;
    plan_.count_visible();
    auto line = plan_.line_of(p_.heads_per_line);
    line.cut_balanced(p_.slices);
    plan_.take_cuts(line, p_.lines);
  }

  // Writes the header and cta_indptr, which a kernel reads first and without which it does nothing.
  WL_FN void write_header(PlanStatus status) {
    PlanTotals totals = {0, 0, 0};
    if (status == PlanStatus::kGood) totals = plan_.totals();
    if (team_.is_first()) {
      *reinterpret_cast<typename K::PlanHeader*>(p_.header) = this->header(status, totals);
    }
    const int idle = totals.items > 0 ? plan_.lists().own : 0;  // the first CTA without work
    if (idle > 0) plan_.write_indptr();
    this->fill_indptr(idle, p_.num_ctas + 1, totals.items);
  }

  WL_FN void write_items() { plan_.write_items(); }

  RolePlan<K, Team> plan_;
};

}  // namespace warploom
