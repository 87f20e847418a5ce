// The order in which items are dealt: scheduler/partition/ordering.py.
#pragma once

#include <warploom/planner/query_tiles.hpp>

namespace warploom {

// A tile of one head, and the CTA that it is given to.
struct DealtItem {
  int tile, head, cta;
};

template <class K, class Team>
class AssigningOrder {
  using Params = typename K::Params;
  using Tiles = QueryTiles<K, Team>;

 public:
  WL_FN AssigningOrder(const Params& p, Tiles& tiles, Team& team, char* memory)
      : p_(p), tiles_(tiles), team_(team) {
    Memory free(memory);
    free.take(sort_, 2ll * p.max_tiles * p.num_kv_heads);
    free.take(before_, p.max_requests);
    scratch_end_ = free.end();
  }
  WL_FN char* scratch_end() const { return scratch_end_; }

  // Writes items in order: the longest first, up to the tolerance; items of like cost by segment,
  // head and rows. If there are sections, the items are then sorted by section.
  WL_FN void write_longest_first(DealtItem* items, wide mean) {
    const int tiles = tiles_.tiles();
    const wide grade = max(wide(1), mean / kTolerance);
    wide most = 0;
    for (int t = 0; t < tiles; ++t) most = max(most, cost(t) / grade);
    for (int t = 0; t < tiles; ++t) sort_[t] = (most - cost(t) / grade) << 32 | t;
    const wide* falling = team_.sort(sort_, tiles);
    DealtItem* item = items;
    for (int begin = 0, end; begin < tiles; begin = end) {
      const auto is_like = [&](wide other) {
        return other >> 32 == falling[begin] >> 32 &&
               tiles_.segment(int(other)) == tiles_.segment(int(falling[begin]));
      };
      for (end = begin + 1; end < tiles && is_like(falling[end]);) ++end;
      for (int head = 0; head < p_.num_kv_heads; ++head) {
        for (int i = begin; i < end; ++i) *item++ = {int(falling[i]), head, 0};
      }
    }
    if (p_.section_keys > 0 && tiles_share_keys()) sort_by_section(items, int(item - items));
  }

 private:
  // Whether several tiles read the same keys on average: the function of model/problem.py.
  WL_FN bool tiles_share_keys() const {
    const wide rows = wide(p_.qo_indptr[p_.num_requests]) * p_.group_size;
    return rows >= wide(kSharingTiles) * p_.rows * p_.num_requests;
  }

  WL_FN void sort_by_section(DealtItem* items, int count) {
    const Batch<Params> batch{p_};
    wide keys = 0;
    for (int r = 0; r < p_.num_requests; ++r) {
      before_[r] = keys;
      keys += batch.kv_len(r);
    }
    const wide total = max(wide(1), keys * p_.num_kv_heads);
    const wide number = (total + p_.section_keys - 1) / p_.section_keys;
    if (number == 1) return;
    const wide length = (total + number - 1) / number;
    for (int i = 0; i < count; ++i) {
      const DealtItem item = items[i];
      const int r = tiles_.segment(item.tile);
      const wide place = before_[r] * p_.num_kv_heads + item.head * batch.kv_len(r);
      sort_[i] = quotient(place, length) << 32 | i;
    }
    const wide* sorted = team_.sort(sort_, count);
    reorder(items, const_cast<wide*>(sorted), count);
  }

  // Permutes items in place, cycle by cycle, since there is no second array of items.
  WL_FN static void reorder(DealtItem* items, wide* from, int count) {
    for (int i = 0; i < count; ++i) {
      if (from[i] < 0) continue;
      const DealtItem first = items[i];
      int at = i;
      for (int next = int(from[at]); next != i; next = int(from[at])) {
        items[at] = items[next];
        from[at] = -1;
        at = next;
      }
      items[at] = first;
      from[at] = -1;
    }
  }

  WL_FN wide cost(int tile) const { return cost_of_chunk(p_, tiles_.visible(tile)); }

  const Params& p_;
  Tiles& tiles_;
  Team& team_;
  wide* sort_;    // [2 * items]
  wide* before_;  // [requests] keys of segments before
  char* scratch_end_;
};

}  // namespace warploom
