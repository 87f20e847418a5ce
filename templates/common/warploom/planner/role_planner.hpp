// Plans a batch of two roles: scheduler/role_lists.py, with a plan for each role.
#pragma once

#include <warploom/planner/planner.hpp>
#include <warploom/role_lists.hpp>

namespace warploom {

template <class K, class Team>
class RolePlanner : public PlannerBase<K, Team, RolePlanner<K, Team>> {
  using Params = typename K::Params;
  using Base = PlannerBase<K, Team, RolePlanner<K, Team>>;
  friend Base;

  static constexpr int kMost = 0x7fffffff;

 public:
  WL_FN RolePlanner(const Params& p, Team& team, char* memory)
      : Base(p, team),
        prefill_shape_(shape_of_prefills(p)),
        decode_shape_(shape_of_decodes(p)),
        prefill_(p, prefill_shape_, team, memory),
        decode_(p, decode_shape_, team, prefill_.scratch_end()) {}
  RolePlanner(const RolePlanner&) = delete;  // its plans point to its shapes

 private:
  using Base::p_, Base::team_;

  // All heads lie on one line. Each CTA has a part of it, may leave rounds of whole items, and two
  // ends.
  WL_FN static RoleShape shape_of_prefills(const Params& p) {
    RoleShape z = shape_of(p);
    z.rows = p.rows, z.keys = p.keys;
    z.fixed = p.fixed, z.per_tile = p.per_tile, z.grain = p.grain, z.partial = p.partial;
    z.max_tiles = p.max_tiles;
    z.lines = 1, z.heads_per_line = p.num_kv_heads, z.columns = (kMostRounds + 2) * p.active_ctas;
    z.marks = z.columns + 1;
    z.fewest = p.decode_rows + 1, z.most = kMost;
    z.shared_list = kSharedPrefills * p.num_ctas;
    return z;
  }
  // Each CTA has a part of a line, which is the best of the options, or may leave two.
  WL_FN static RoleShape shape_of_decodes(const Params& p) {
    RoleShape z = shape_of(p);
    z.rows = p.decode_rows, z.keys = p.decode_keys;
    z.fixed = p.decode_fixed, z.per_tile = p.decode_per_tile;
    z.grain = p.decode_grain, z.partial = p.decode_partial;
    z.max_tiles = p.max_requests;
    z.lines = 1, z.heads_per_line = p.num_kv_heads, z.columns = 3 * p.active_ctas;
    z.marks = kOptions * (p.active_ctas + 1);  // not fewer than parts
    z.role = 1;
    z.fewest = 1, z.most = p.decode_rows;
    z.list = kDecodeLists * p.num_ctas, z.shared_list = kSharedDecodes * p.num_ctas;
    return z;
  }
  WL_FN static RoleShape shape_of(const Params& p) {
    RoleShape z = {};
    z.few = p.few, z.snap = p.snap, z.max_requests = p.max_requests;
    return z;
  }

  WL_FN PlanStatus count_tiles() {
    const PlanStatus status = prefill_.template count_tiles<!Team::kIsHost>();
    return status == PlanStatus::kGood ? decode_.template count_tiles<false>() : status;
  }

  WL_FN void assign() {
    auto prefills = prefill_.lay();
    auto decodes = decode_.lay();
    const int ctas = prefill_ctas(prefills.length(), decodes.length());
    if (prefill_.tiles() > 0) {
      parts_ = prefills.share(ctas, p_.active_ctas, p_.shared, p_.shortest_cut, p_.cached_keys);
      prefill_shape_.columns = parts_.own + parts_.shared;
      prefill_shape_.list = p_.active_ctas - ctas;
      prefill_shape_.own = parts_.own;
      prefill_.adopt(prefills);
    }
    if (decode_.tiles() > 0) {
      const int decoding = ctas < p_.active_ctas ? p_.active_ctas - ctas : 1;
      spread_heads(decoding);
      decodes.take_heads();
      if (prefill_.tiles() > 0 && decoding > 1) {
        decode_parts_ = decodes.share_decodes(p_.decodes_shared, p_.decode_claim);
      }
      if (decode_parts_.shared == 0) decodes.choose();
      decode_shape_.columns = decode_parts_.own + decode_parts_.shared;
      decode_.adopt(decodes);
    }
    assign_offsets();
  }

  // CTAs that prefill, of all that are active; see `RolePrices.ctas`. A single one has both roles.
  WL_FN int prefill_ctas(wide prefill, wide decode) const {
    const int active = p_.active_ctas;
    if (prefill == 0 || decode == 0) return prefill > 0 ? active : 0;
    if (active == 1) return 1;
    prefill *= p_.prefill_price, decode *= p_.decode_price;
    const wide saturating = min(p_.saturating, active), spare = active - saturating;
    const wide by_memory = (prefill * saturating - 1) / decode + 1;
    const wide by_all = (prefill * active - 1) / (prefill + decode) + 1;
    const wide taken = by_memory < spare ? (by_memory + spare) / 2 : by_all;
    return int(max(wide(1), min(taken, wide(active - 1))));
  }

  // Lines of decodes on so many CTAs; see `Grid.of`.
  WL_FN void spread_heads(int ctas) {
    const int heads = p_.num_kv_heads;
    const bool has_each = ctas % heads * p_.idle <= ctas && heads <= ctas;
    decode_shape_.lines = has_each ? heads : 1;
    decode_shape_.heads_per_line = has_each ? 1 : heads;
    decode_shape_.columns = decode_shape_.own = ctas / decode_shape_.lines;
    decode_parts_ = {decode_shape_.own, 0};
  }

  // Items of prefills that CTAs have, then decodes that they have, then shared prefills, then
  // shared decodes; slots of decodes come last.
  WL_FN void assign_offsets() {
    const PlanTotals prefills = prefill_.totals(), decodes = decode_.totals();
    own_items_ = prefill_.tiles() > 0 ? prefill_.items_before(parts_.own) : 0;
    if (decodes.items > 0) {
      own_decodes_ = decode_shape_.lines * decode_.items_before(decode_parts_.own);
      shared_decodes_ = decodes.items - own_decodes_;
    }
    prefill_shape_.shared_item = own_decodes_;
    decode_shape_.item = own_items_;
    decode_shape_.shared_item = prefills.items;
    decode_shape_.slot = prefills.slots;
    decode_shape_.merge = prefills.merges;
  }

  // Writes what a kernel reads first, and without which it does nothing.
  WL_FN void sign(PlanStatus status) {
    const bool is_good = status == PlanStatus::kGood;
    PlanTotals totals = {0, 0, 0};
    SharedParts decodes = {0, 0};  // lists
    if (is_good) {
      const PlanTotals prefill = prefill_.totals(), decode = decode_.totals();
      totals = {prefill.items + decode.items, prefill.merges + decode.merges,
                prefill.slots + decode.slots};
      const int lines = decode.items > 0 ? decode_shape_.lines : 0;
      decodes = {lines * decode_parts_.own, lines * decode_parts_.shared};
    }
    if (team_.is_first()) {
      typename K::PlanHeader header = this->header(status, totals);
      header.num_shared = is_good ? parts_.shared : 0;
      header.num_active = p_.active_ctas;
      header.num_decodes = decodes.own;
      header.num_shared_decodes = decodes.shared;
      *reinterpret_cast<typename K::PlanHeader*>(p_.header) = header;
    }
    const int ctas = p_.num_ctas, all = kRoleLists * ctas + 1;
    if (totals.items == 0) return this->fill_indptr(0, all, 0);
    const RoleShape &z = prefill_shape_, &d = decode_shape_;
    if (prefill_.tiles() > 0) prefill_.write_indptr();
    if (decodes.own > 0) decode_.write_indptr();
    this->fill_indptr(0, z.list, 0);
    this->fill_indptr(z.list + parts_.own, d.list, own_items_);
    this->fill_indptr(d.list + decodes.own, z.shared_list, own_items_ + own_decodes_);
    this->fill_indptr(z.shared_list + parts_.shared, d.shared_list, totals.items - shared_decodes_);
    this->fill_indptr(d.shared_list + decodes.shared, all, totals.items);
  }

  WL_FN void write_items() {
    if (prefill_.tiles() > 0) prefill_.write_items();
    if (decode_.tiles() > 0) decode_.write_items();
  }

  RoleShape prefill_shape_, decode_shape_;
  RolePlan<K, Team, RoleShape> prefill_, decode_;
  SharedParts parts_ = {0, 0}, decode_parts_ = {0, 0};  // columns; of prefills, and of decodes
  int own_items_ = 0, own_decodes_ = 0, shared_decodes_ = 0;
};

}  // namespace warploom
