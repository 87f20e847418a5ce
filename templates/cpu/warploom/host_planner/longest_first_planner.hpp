// Plans a batch by assigning tiles the longest first, section by section, and levelling the last
// ones: longest_first.py, ordering.py and balance.py of scheduler/partition/, on a host. A device
// would find little in it that threads can do side by side.
#pragma once

#include <warploom/host_planner/levelling.hpp>
#include <warploom/planner/planner.hpp>

namespace warploom {

template <class K, class Team>
class LongestFirstPlanner : public PlannerBase<K, Team, LongestFirstPlanner<K, Team>> {
  using Params = typename K::Params;
  using WorkItem = typename K::WorkItem;
  using Base = PlannerBase<K, Team, LongestFirstPlanner<K, Team>>;
  friend Base;

 public:
  WL_FN LongestFirstPlanner(const Params& p, Team& team, char* memory)
      : Base(p, team),
        plan_(p, shape_of_all(p), team, memory),
        s_(p, plan_.scratch_end()),
        level_(p, s_.level) {}

 private:
  using Base::p_, Base::team_;

  static constexpr wide kMost = 0x7fffffffffffffff;

  struct Item {
    int tile, head, cta;
  };
  struct Arrays {
    wide* sort;    // [2 * items]
    Item* items;   // [items] in the order in which they are assigned
    wide* before;  // [requests] keys of segments before
    wide* queue;   // [ctas + 1] `queued` loads; behind them one that is above all
    int* last;     // [ctas] the last item of each
    int* count;    // [ctas + 1] lists begin there
    char* level;

    WL_FN Arrays(const Params& p, char* memory) {
      Memory free(memory);
      const long long most = (long long)(p.max_tiles) * p.num_kv_heads;
      free.take(sort, 2 * most);
      free.take(before, p.max_requests);
      free.take(queue, p.num_ctas + 1);
      free.take(items, most);
      free.take(last, p.num_ctas);
      free.take(count, p.num_ctas + 1);
      level = free.end();
    }
  };

  WL_FN PlanStatus count_tiles() { return plan_.template count_tiles<false>(); }

  WL_FN void assign() {
    if (plan_.tiles() == 0) return;
    plan_.ask_mask();
    items_ = plan_.tiles() * p_.num_kv_heads;
    wide total = 0;
    for (int t = 0; t < plan_.tiles(); ++t) total += cost(t);
    const wide mean = (total * p_.num_kv_heads + p_.active_ctas - 1) / p_.active_ctas;
    order(mean);
    deal();
    for (int cta = 0; cta < p_.active_ctas; ++cta) {
      level_.tiles(cta) = plan_.visible(s_.items[s_.last[cta]].tile);
    }
    level_.find(s_.queue, mean);
  }

  WL_FN wide cost(int tile) const { return p_.fixed + wide(p_.per_tile) * plan_.visible(tile); }

  // The longest first, up to the tolerance; of these by segment, head, and rows. Then by section.
  WL_FN void order(wide mean) {
    const int tiles = plan_.tiles();
    const wide grade = max(wide(1), mean / p_.tolerance);
    wide most = 0;
    for (int t = 0; t < tiles; ++t) most = max(most, cost(t) / grade);
    for (int t = 0; t < tiles; ++t) s_.sort[t] = (most - cost(t) / grade) << 32 | t;
    const wide* falling = team_.sort(s_.sort, tiles);
    Item* item = s_.items;
    for (int begin = 0, end; begin < tiles; begin = end) {
      const auto is_like = [&](wide other) {
        return other >> 32 == falling[begin] >> 32 &&
               plan_.segment(int(other)) == plan_.segment(int(falling[begin]));
      };
      for (end = begin + 1; end < tiles && is_like(falling[end]);) ++end;
      for (int head = 0; head < p_.num_kv_heads; ++head) {
        for (int i = begin; i < end; ++i) *item++ = {int(falling[i]), head, 0};
      }
    }
    if (has_sections()) sort_by_section();
  }

  // Whether several tiles read the same keys, and the cache does not hold them all.
  WL_FN bool has_sections() const {
    const wide rows = wide(p_.qo_indptr[p_.num_requests]) * p_.group_size;
    return p_.section_keys > 0 && rows >= wide(p_.sharing_tiles) * p_.rows * p_.num_requests;
  }

  WL_FN void sort_by_section() {
    const Batch<Params> batch{p_};
    wide keys = 0;
    for (int r = 0; r < p_.num_requests; ++r) {
      s_.before[r] = keys;
      keys += batch.kv_len(r);
    }
    const wide total = max(wide(1), keys * p_.num_kv_heads);
    const wide number = (total + p_.section_keys - 1) / p_.section_keys;
    if (number == 1) return;
    const wide length = (total + number - 1) / number;
    for (int i = 0; i < items_; ++i) {
      const Item item = s_.items[i];
      const int r = plan_.segment(item.tile);
      const wide place = s_.before[r] * p_.num_kv_heads + item.head * batch.kv_len(r);
      s_.sort[i] = quotient(place, length) << 32 | i;
    }
    const wide* sorted = team_.sort(s_.sort, items_);
    reorder(const_cast<wide*>(sorted));
  }

  // Follows the cycles of a permutation, since items have no second place.
  WL_FN void reorder(wide* from) {
    for (int i = 0; i < items_; ++i) {
      if (from[i] < 0) continue;
      const Item first = s_.items[i];
      int at = i;
      for (int next = int(from[at]); next != i; next = int(from[at])) {
        s_.items[at] = s_.items[next];
        from[at] = -1;
        at = next;
      }
      s_.items[at] = first;
      from[at] = -1;
    }
  }

  // Every item, in order, to the CTA with the least load; of equal ones to the first (Algorithm 1).
  WL_FN void deal() {
    const int ctas = p_.active_ctas;
    for (int i = 0; i < ctas; ++i) {
      s_.queue[i] = queued(0, i);  // a heap
      s_.last[i] = 0;
    }
    s_.queue[ctas] = kMost;
    for (int i = 0; i < items_; ++i) {
      const int cta = cta_of(s_.queue[0]);
      s_.items[i].cta = cta;
      s_.last[cta] = i;
      replace_least(s_.queue[0] + queued(cost(s_.items[i].tile), 0));
    }
    for (int i = 1; i < ctas; ++i) {  // a heap is nearly sorted
      const wide code = s_.queue[i];
      int at = i;
      for (; at > 0 && s_.queue[at - 1] > code; --at) s_.queue[at] = s_.queue[at - 1];
      s_.queue[at] = code;
    }
  }

  // Which child is less nobody foresees, so that is a sum and no branch.
  WL_FN void replace_least(wide code) {
    const int ctas = p_.active_ctas;
    int at = 0;
    for (int child = 1; child < ctas; child = 2 * at + 1) {
      child += s_.queue[child + 1] < s_.queue[child];
      if (s_.queue[child] >= code) break;
      s_.queue[at] = s_.queue[child];
      at = child;
    }
    s_.queue[at] = code;
  }

  WL_FN void sign(PlanStatus status) {
    PlanTotals totals = {0, 0, 0};
    if (status == PlanStatus::kGood && plan_.tiles() > 0) {
      totals = {items_ + level_.pieces(), level_.owners(), level_.pieces() + level_.owners()};
    }
    *reinterpret_cast<typename K::PlanHeader*>(p_.header) = this->header(status, totals);
    for (int cta = 0; cta <= p_.num_ctas; ++cta) s_.count[cta] = 0;
    if (totals.items > 0) {
      for (int i = 0; i < items_; ++i) ++s_.count[s_.items[i].cta + 1];
      for (int i = 0; i < level_.pieces(); ++i) ++s_.count[level_.piece(i).cta + 1];
    }
    for (int cta = 0; cta < p_.num_ctas; ++cta) s_.count[cta + 1] += s_.count[cta];
    for (int cta = 0; cta <= p_.num_ctas; ++cta) p_.cta_indptr[cta] = s_.count[cta];
  }

  // Partial items come first in each list: that whose end was cut off, then pieces; then others.
  WL_FN void write_items() {
    if (plan_.tiles() == 0) return;
    write_owners();
    write_pieces();
    for (int i = 0; i < items_; ++i) {
      const Item& item = s_.items[i];
      if (!is_cut(i)) write(item.cta, plan_.work(item.tile, item.head));
    }
    for (int cta = 0; cta < p_.active_ctas; ++cta) {
      const int first = p_.cta_indptr[cta];
      if (first < p_.cta_indptr[cta + 1]) write_opening(cta, items()[first]);
    }
  }

  WL_FN bool is_cut(int item) const {
    const int cta = s_.items[item].cta;
    return s_.last[cta] == item && level_.gives(cta);
  }

  WL_FN void write_owners() {
    for (int i = 0, merge = -1; i < level_.pieces(); ++i) {
      if (!level_.opens(i)) continue;
      ++merge;
      const auto& piece = level_.piece(i);
      const Item& item = s_.items[s_.last[piece.owner]];
      WorkItem work = plan_.work(item.tile, item.head);
      work.kv_end = key_after(i);
      work.merge = merge;
      work.slot = i + merge;
      write(item.cta, work);
    }
  }

  WL_FN void write_pieces() {
    auto* const merges = reinterpret_cast<typename K::Merge*>(p_.merges);
    for (int i = 0, merge = -1; i < level_.pieces(); ++i) {
      const auto& piece = level_.piece(i);
      merge += level_.opens(i);
      const int slot = i + merge + 1;  // one before the first piece is the owner's
      const Item& item = s_.items[s_.last[piece.owner]];
      WorkItem work = plan_.work(item.tile, item.head);
      work.kv_begin = key_after(i);
      if (piece.end < plan_.visible(item.tile)) work.kv_end = key_after(i + 1);
      work.slot = slot;
      work.merge = merge;
      write(piece.cta, work);
      if (level_.opens(i)) {
        merges[merge].first_slot = slot - 1;
        merges[merge].num_slots = 1;
      }
      ++merges[merge].num_slots;
    }
  }

  // The key at which a piece begins.
  WL_FN int key_after(int i) const {
    const auto& piece = level_.piece(i);
    return plan_.key_after(s_.items[s_.last[piece.owner]].tile, piece.begin);
  }

  WL_FN WorkItem* items() const { return reinterpret_cast<WorkItem*>(p_.items); }
  WL_FN void write(int cta, const WorkItem& work) { items()[s_.count[cta]++] = work; }
  WL_FN void write_opening(int cta, const WorkItem& work) {
    Opening<K>& opening = reinterpret_cast<Opening<K>*>(p_.openings)[cta];
    opening.item = work;
    opening.segment = Batch<Params>{p_}.template segment<typename K::Segment>(work.segment);
  }

  RolePlan<K, Team> plan_;
  Arrays s_;
  Levelling<Params> level_;
  int items_ = 0;
};

}  // namespace warploom
