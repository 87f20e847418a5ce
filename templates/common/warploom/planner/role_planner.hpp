// Plans a batch of two roles: scheduler/role_lists.py, with a part for each role.
#pragma once

#include <warploom/planner/planner.hpp>

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
  RolePlanner(const RolePlanner&) = delete;  // its parts point to its shapes

 private:
  using Base::p_, Base::team_;

  // All heads lie on one line. Each CTA has a part of it and may leave another.
  WL_FN static RoleShape shape_of_prefills(const Params& p) {
    RoleShape z = shape_of(p);
    z.rows = p.rows, z.keys = p.keys;
    z.fixed = p.fixed, z.per_tile = p.per_tile, z.grain = p.grain, z.partial = p.partial;
    z.max_tiles = p.max_tiles;
    z.lines = 1, z.heads_per_line = p.num_kv_heads, z.columns = 2 * p.active_ctas;
    z.fewest = p.decode_rows + 1, z.most = kMost;
    z.shared_list = 2 * p.num_ctas;
    return z;
  }
  WL_FN static RoleShape shape_of_decodes(const Params& p) {
    RoleShape z = shape_of(p);
    z.rows = p.decode_rows, z.keys = p.decode_keys;
    z.fixed = p.decode_fixed, z.per_tile = p.decode_per_tile;
    z.grain = p.decode_grain, z.partial = p.decode_partial;
    z.max_tiles = p.max_requests;
    z.lines = 1, z.heads_per_line = p.num_kv_heads, z.columns = p.active_ctas;
    z.role = 1;
    z.fewest = 1, z.most = p.decode_rows;
    z.list = p.num_ctas, z.own = kMost;
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
      parts_ = prefills.share(ctas, p_.active_ctas, p_.shared);
      prefill_shape_.columns = parts_.own + parts_.shared;
      prefill_shape_.list = p_.active_ctas - ctas;
      prefill_shape_.own = parts_.own;
      prefill_.cut(prefills);
    }
    if (decode_.tiles() > 0) {
      spread_heads(ctas < p_.active_ctas ? p_.active_ctas - ctas : 1);
      decodes.take_heads();
      decodes.choose();
      decode_.cut(decodes);
    }
    place();
  }

  // CTAs that prefill, of all that are active; see `RolePrices.ctas`. A single one has both roles.
  WL_FN int prefill_ctas(wide prefill, wide decode) const {
    const int active = p_.active_ctas;
    if (prefill == 0 || decode == 0) return prefill > 0 ? active : 0;
    if (active == 1) return 1;
    prefill *= p_.prefill_price, decode *= p_.decode_price;
    const wide by_memory = (prefill * min(p_.saturating, active) - 1) / decode + 1;
    const wide by_all = (prefill * active - 1) / (prefill + decode) + 1;
    return int(max(wide(1), min(min(by_memory, by_all), wide(active - 1))));
  }

  // Lines of decodes on so many CTAs; see `Grid.of`.
  WL_FN void spread_heads(int ctas) {
    const int heads = p_.num_kv_heads;
    const bool has_each = ctas % heads * p_.idle <= ctas && heads <= ctas;
    decode_shape_.lines = has_each ? heads : 1;
    decode_shape_.heads_per_line = has_each ? 1 : heads;
    decode_shape_.columns = ctas / decode_shape_.lines;
  }

  // Items of prefills that CTAs have, then decodes, then shared prefills; slots of decodes come
  // last.
  WL_FN void place() {
    const PartTotals prefills = prefill_.totals(), decodes = decode_.totals();
    own_items_ = prefill_.tiles() > 0 ? prefill_.items_before(parts_.own) : 0;
    prefill_shape_.shared_item = decodes.items;
    decode_shape_.item = own_items_;
    decode_shape_.slot = prefills.slots;
    decode_shape_.merge = prefills.merges;
  }

  // Writes what a kernel reads first, and without which it does nothing.
  WL_FN void sign(PlanStatus status) {
    const bool is_good = status == PlanStatus::kGood;
    PartTotals totals = {0, 0, 0};
    int decode_items = 0;
    if (is_good) {
      const PartTotals prefills = prefill_.totals(), decodes = decode_.totals();
      totals = {prefills.items + decodes.items, prefills.merges + decodes.merges,
                prefills.slots + decodes.slots};
      decode_items = decodes.items;
    }
    if (team_.is_first()) {
      typename K::PlanHeader header = this->header(status, totals);
      header.num_shared = is_good ? parts_.shared : 0;
      header.num_active = p_.active_ctas;
      header.num_decodes = decode_items > 0 ? decode_shape_.columns * decode_shape_.lines : 0;
      *reinterpret_cast<typename K::PlanHeader*>(p_.header) = header;
    }
    const int ctas = p_.num_ctas, lists = 3 * ctas;
    if (totals.items == 0) return this->fill_indptr(0, lists + 1, 0);
    const RoleShape &z = prefill_shape_, &d = decode_shape_;
    const int decoding = decode_items > 0 ? d.columns * d.lines : 0;
    if (prefill_.tiles() > 0) prefill_.write_indptr();
    if (decode_items > 0) decode_.write_indptr();
    this->fill_indptr(0, z.list, 0);
    this->fill_indptr(z.list + parts_.own, ctas, own_items_);
    this->fill_indptr(ctas + decoding, 2 * ctas, own_items_ + decode_items);
    this->fill_indptr(2 * ctas + parts_.shared, lists + 1, totals.items);
  }

  WL_FN void write_items() {
    if (prefill_.tiles() > 0) prefill_.write_items();
    if (decode_.tiles() > 0) decode_.write_items();
  }

  RoleShape prefill_shape_, decode_shape_;
  Part<K, Team, RoleShape> prefill_, decode_;
  SharedParts parts_ = {0, 0};
  int own_items_ = 0;
};

}  // namespace warploom
