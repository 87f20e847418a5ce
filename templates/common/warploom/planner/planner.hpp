// Plans a batch: the Stream-K partition of scheduler/partition/stream_k.py, by a team of threads (a
// host has a team of one). Every team works out where the line is cut; then all teams write the
// plan together. None waits for another: the last to have looked at its share of the pages signs
// the plan.
#pragma once

#include <warploom/planner/role_plan.hpp>

namespace warploom {

// What plans of any number of roles have in common: `Derived` counts, assigns, signs and writes.
template <class K, class Team, class Derived>
class PlannerBase {
  using Params = typename K::Params;
  using Segment = typename K::Segment;

 public:
  // Returns what is wrong with the batch; then the plan is empty, and says so in its header.
  WL_FN PlanStatus run() {
    PlanStatus status = self().count_tiles();
    if (status != PlanStatus::kGood) {
      if (team_.is_first_team()) self().sign(status);
      return status;
    }
    team_.vote(write_blocks());
    self().assign();
    bool has_negative = false;  // of all pages, which the last team knows
    const bool is_last = team_.is_last(has_negative);
    if (has_negative) status = PlanStatus::kPage;
    if (is_last) self().sign(status);
    write_segments();
    self().write_items();
    return status;
  }

 protected:
  WL_FN PlannerBase(const Params& p, Team& team) : p_(p), team_(team) {}

  // Writes a header but for what only plans of some kinds have.
  WL_FN typename K::PlanHeader header(PlanStatus status, const PlanTotals& totals) const {
    typename K::PlanHeader header = {};
    header.num_items = totals.items;
    header.num_segments = status == PlanStatus::kGood ? p_.num_requests : 0;
    header.num_merges = totals.merges;
    header.num_slots = totals.slots;
    header.status = int(status);
    return header;
  }
  // Lists from one on, before another, begin with this item.
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

  // Only where `kv_indptr` is right. True if this thread has seen a negative page.
  WL_FN bool write_blocks() const {
    if (!Batch<Params>{p_}.is_paged() || p_.kv_indices == nullptr) return false;
    return team_.copy(p_.kv_indices, p_.indices, p_.kv_indptr[p_.num_requests]);
  }
};

// Plans of one role.
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

  // Works out the line and its cuts: every team does, for none waits for the others.
  WL_FN void assign() {
    if (plan_.tiles() == 0) return;
    plan_.ask_mask();
    auto line = plan_.lay(p_.heads_per_line);
    line.choose(p_.slices);
    plan_.adopt(line, p_.lines);
  }

  // Writes what a kernel reads first, and without which it does nothing.
  WL_FN void sign(PlanStatus status) {
    PlanTotals totals = {0, 0, 0};
    if (status == PlanStatus::kGood) totals = plan_.totals();
    if (team_.is_first()) {
      *reinterpret_cast<typename K::PlanHeader*>(p_.header) = this->header(status, totals);
    }
    const int idle = totals.items > 0 ? plan_.lists().own : 0;  // the first without work
    if (idle > 0) plan_.write_indptr();
    this->fill_indptr(idle, p_.num_ctas + 1, totals.items);
  }

  WL_FN void write_items() {
    if (plan_.tiles() > 0) plan_.write_items();
  }

  RolePlan<K, Team> plan_;
};

}  // namespace warploom
