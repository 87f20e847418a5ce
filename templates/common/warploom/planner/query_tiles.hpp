// The query tiles of a role: how many a batch has, and which keys each sees. This is a base class
// of the role's plan, since objects that refer to each other would keep a device's registers in
// memory.
#pragma once

#include <warploom/opening.hpp>
#include <warploom/planner/scratch.hpp>
#include <warploom/planner/tiles.hpp>

namespace warploom {

template <class K, class Team>
class QueryTiles {
  using Params = typename K::Params;
  using WorkItem = typename K::WorkItem;

 public:
  // Counts the query tiles. With kChecks it returns the batch's first error instead, if any.
  template <bool kChecks>
  WL_FN PlanStatus count_tiles() {
    const Range mine = team_.range(p_.num_requests);
    int wrong = 0, tiles = 0;
    bool several = false;
    if (kChecks && p_.num_requests == 0) wrong = int(batch_.check_empty());
    team_.each(mine, [&](int r) {
      const int own_wrong = kChecks ? int(batch_.check(r)) : 0;
      if (own_wrong != 0 && (wrong == 0 || own_wrong < wrong)) wrong = own_wrong;
      const int own = wrong == 0 ? z_.tiles_of(batch_.fused_rows(r)) : 0;
      tiles += own;
      several |= own > 1;
    });
    if (team_.any(wrong != 0)) return first_wrong(wrong);
    has_several_ = team_.any(several);
    wide total = 0;
    int first = int(team_.before(tiles, total));
    team_.each(mine, [&](int r) {
      s_.first_tile[r] = first;
      first += z_.tiles_of(batch_.fused_rows(r));
    });
    tiles_ = int(total);
    if (team_.is_first()) s_.first_tile[p_.num_requests] = tiles_;
    team_.sync();
    return PlanStatus::kGood;
  }

  WL_FN int tiles() const { return tiles_; }
  WL_FN char* scratch_end() const { return s_.end; }

  // Finds the keys and the visible key tiles of each query tile.
  WL_FN void count_visible() {
    const bool is_one_each = !has_several_ && tiles_ == p_.num_requests;
    const auto first_tile = [this](int r) { return s_.first_tile[r]; };
    int segment = -1;
    team_.each(team_.range(tiles_), [&](int t) {
      if (segment < 0) segment = is_one_each ? t : last_not_above(p_.num_requests, t, first_tile);
      while (s_.first_tile[segment + 1] <= t) ++segment;
      s_.segment[t] = segment;
      MaskOracle<K> mask = mask_of(t);
      const Range keys = mask.bounds();
      const int visible = mask.visible(keys);
      s_.keys[t] = visible > 0 ? keys : Range{0, 0};
      s_.visible[t] = visible;
    });
    team_.sync();
  }

  // Properties of query tile t, after count_visible().
  WL_FN int segment(int t) const { return s_.segment[t]; }
  WL_FN int visible(int t) const { return s_.visible[t]; }
  // The key before which query tile t has `visible` visible key tiles.
  WL_FN int key_after(int t, int visible) const {
    const Range keys = s_.keys[t];
    const bool sees_all = wide(s_.visible[t]) * z_.keys >= keys.end - keys.begin;  // all of `keys`
    return sees_all ? keys.begin + visible * z_.keys : mask_of(t).key_after(keys, visible);
  }
  WL_FN WorkItem work(int t, int kv_head) const {  // every member by name, as in Batch::segment
    const int segment = s_.segment[t];
    WorkItem work;
    work.segment = segment;
    work.kv_head = kv_head;
    work.row_begin = tile(t, segment).row_begin;
    work.kv_begin = s_.keys[t].begin;
    work.kv_end = s_.keys[t].end;
    work.slot = work.merge = -1;
    if constexpr (K::kHasRoles) {
      work.role = z_.role;
    } else {
      work.rows = 0;
    }
    return work;
  }

 protected:
  WL_FN QueryTiles(const Params& p, const RoleShape& shape, Team& team, char* memory)
      : p_(p), z_(shape), team_(team), s_(shape, memory), batch_{p} {}

  const Params& p_;
  const RoleShape z_;
  Team& team_;
  Scratch s_;
  Batch<Params> batch_;
  int tiles_ = 0;
  bool has_several_ = false;  // some segment has several query tiles

 private:
  // The first error in the order of PlanStatus: the others may follow from it.
  WL_FN PlanStatus first_wrong(int wrong) const {
    int found = 1;
    while (!team_.any(wrong == found)) ++found;
    return PlanStatus(found);
  }

  WL_FN QueryTile tile(int t, int segment) const {
    const int row = (s_.first_tile[segment + 1] - 1 - t) * z_.rows;  // the last rows come first
    return {segment, row, min(row + z_.rows, batch_.fused_rows(segment))};
  }
  WL_FN MaskOracle<K> mask_of(int t) const {
    const int segment = s_.segment[t];
    return {p_, z_.keys, tile(t, segment), batch_.q_len(segment), int(batch_.kv_len(segment))};
  }
};

}  // namespace warploom
