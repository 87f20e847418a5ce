// Plans a batch of two roles: scheduler/partition/role_lists.py, with a plan for each role.
#pragma once

#include <warploom/planner/planner.hpp>

namespace warploom {

// `Prefills` is `RolePlan` or a class derived from it that may partition prefills in another way.
template <class K, class Team, class Prefills = RolePlan<K, Team>>
class RolePlanner : public PlannerBase<K, Team, RolePlanner<K, Team, Prefills>> {
  using Params = typename K::Params;
  using Header = typename K::PlanHeader;
  using Base = PlannerBase<K, Team, RolePlanner<K, Team, Prefills>>;
  friend Base;

 public:
  WL_FN RolePlanner(const Params& p, Team& team, char* memory)
      : Base(p, team),
        prefill_(p, shape_of_prefills(p), team, memory),
        decode_(p, shape_of_decodes(p), team, prefill_.scratch_end()) {}

 private:
  using Base::p_, Base::team_;

  // Lines of prefills are cut by Line::cut_prefills; they never have several options of boundaries.
  WL_FN static RoleShape shape_of_prefills(const Params& p) {
    RoleShape z = shape_of_all(p);
    z.max_slices = kPrefillSlices * p.active_ctas;
    z.max_marks = z.max_slices + 1;
    z.least_rows = p.decode_rows + 1;
    z.shared_lists = Header::kSharedPrefills * p.num_ctas;
    return z;
  }
  // Each decoding CTA has one slice of a line, by the best of the options, or shared ones besides.
  WL_FN static RoleShape shape_of_decodes(const Params& p) {
    RoleShape z = shape_of_all(p);
    z.rows = p.decode_rows, z.keys = p.decode_keys;
    z.fixed = p.decode_fixed, z.per_tile = p.decode_per_tile;
    z.grain = p.decode_grain, z.partial = p.decode_partial;
    z.max_tiles = p.max_requests;
    static_assert(kOptions >= kDecodeSlices, "boundaries of slices have room where options have");
    z.max_slices = kDecodeSlices * p.active_ctas;
    z.max_marks = kOptions * (p.active_ctas + 1);
    z.role = 1;
    z.most_rows = p.decode_rows;
    z.own_lists = Header::kDecodeLists * p.num_ctas,
    z.shared_lists = Header::kSharedDecodes * p.num_ctas;
    return z;
  }

  WL_FN PlanStatus count_tiles() {
    const PlanStatus status = prefill_.template count_tiles<!Team::kIsHost>();
    return status == PlanStatus::kGood ? decode_.template count_tiles<false>() : status;
  }

  // Prefills of all heads lie on one line. Decodes have the first CTAs, prefills the next ones.
  WL_FN void assign() {
    prefill_.count_visible();
    decode_.count_visible();  // before there are lines, which would take up registers
    auto prefills = prefill_.line_of(p_.num_kv_heads);
    auto decodes = decode_.line_of(p_.num_kv_heads);
    const int ctas = prefill_ctas(prefills.length(), decodes.length());
    first_prefill_ = p_.active_ctas - ctas;
    const bool has_prefills = prefill_.tiles() > 0;
    if (has_prefills) prefill_.partition_prefills(prefills, ctas, decode_.tiles() == 0);
    if (decode_.tiles() > 0) {
      const Grid grid = grid_of(max(1, first_prefill_));
      decodes.set_heads(grid.heads);
      const bool is_shared = has_prefills && first_prefill_ > 1 && decodes.cut_decodes(grid.slices);
      if (!is_shared) decodes.cut_balanced(grid.slices);
      decode_.take_cuts(decodes, grid.lines);
    }
  }

  // How many of the active CTAs prefill; see `RolePrices.ctas`. A single CTA has both roles.
  WL_FN int prefill_ctas(wide prefill, wide decode) const {
    const int active = p_.active_ctas;
    if (prefill == 0 || decode == 0) return prefill > 0 ? active : 0;
    if (active == 1) return 1;
    prefill *= p_.prefill_price, decode *= p_.decode_price;
    const wide saturating = min(p_.saturating, active), others = active - saturating;
    const wide by_memory = (prefill * saturating - 1) / decode + 1;
    const wide by_all = prefill * active / (prefill + decode);
    const wide with_idle = by_memory + (others - by_memory) / kPerIdlePrefill;
    const wide taken = by_memory < others ? max(with_idle, others / 2) : by_all;
    return int(max(wide(1), min(taken, wide(active - 1))));
  }

  // Lines of decodes on `ctas` CTAs; see `Grid.of`.
  WL_FN Grid grid_of(int ctas) const {
    const int heads = p_.num_kv_heads;
    const bool has_each = ctas % heads * kPerIdleCta <= ctas && heads <= ctas;
    return has_each ? Grid{heads, 1, ctas / heads} : Grid{1, heads, ctas};
  }

  // Order of items in the plan: prefills that CTAs own, decodes that CTAs own, shared prefills,
  // shared decodes. Slots and merges of decodes come behind those of prefills.
  WL_FN Offsets of_prefills() const { return {first_prefill_, 0, decode_.own_items(), 0, 0}; }
  WL_FN Offsets of_decodes() const {
    const PlanTotals prefills = prefill_.totals();
    return {0, prefill_.own_items(), prefills.items, prefills.slots, prefills.merges};
  }

  // Writes the header and cta_indptr, which a kernel reads first and without which it does nothing.
  WL_FN void write_header(PlanStatus status) {
    const bool is_good = status == PlanStatus::kGood;
    PlanTotals totals = {0, 0, 0};
    OwnAndShared prefills = {0, 0}, decodes = {0, 0};  // lists
    if (is_good) {
      const PlanTotals prefill = prefill_.totals(), decode = decode_.totals();
      totals = {prefill.items + decode.items, prefill.merges + decode.merges,
                prefill.slots + decode.slots};
      prefills = prefill_.lists(), decodes = decode_.lists();
    }
    if (team_.is_first()) {
      Header header = this->header(status, totals);
      header.num_shared_prefills = prefills.shared;
      header.num_active = p_.active_ctas;
      header.num_decode_ctas = decodes.own;
      header.num_shared_decodes = decodes.shared;
      *reinterpret_cast<Header*>(p_.header) = header;
    }
    if (totals.items == 0) return this->fill_indptr(0, Header::kRoleLists * p_.num_ctas + 1, 0);
    prefill_.write_indptr(of_prefills());
    decode_.write_indptr(of_decodes());
    fill_between(prefills, decodes, totals.items);
  }

  // Fills cta_indptr for empty lists, before, between and behind the lists with items.
  WL_FN void fill_between(const OwnAndShared& prefills, const OwnAndShared& decodes, int items) {
    const int first = first_prefill_, ctas = p_.num_ctas;
    const int own_items = prefill_.own_items(), own = own_items + decode_.own_items();
    const int shared_decodes = items - decode_.totals().items + decode_.own_items();
    this->fill_indptr(0, first, 0);
    this->fill_indptr(first + prefills.own, Header::kDecodeLists * ctas, own_items);
    this->fill_indptr(Header::kDecodeLists * ctas + decodes.own, Header::kSharedPrefills * ctas,
                      own);
    this->fill_indptr(Header::kSharedPrefills * ctas + prefills.shared,
                      Header::kSharedDecodes * ctas, shared_decodes);
    this->fill_indptr(Header::kSharedDecodes * ctas + decodes.shared, Header::kRoleLists * ctas + 1,
                      items);
  }

  WL_FN void write_items() {
    prefill_.write_items(of_prefills());
    decode_.write_items(of_decodes());
  }

  Prefills prefill_;
  RolePlan<K, Team> decode_;
  int first_prefill_ = 0;  // first CTA that prefills
};

}  // namespace warploom
