// Deals tiles in the order of `AssigningOrder`, and levels loads: longest_first.py and balance.py
// of scheduler/partition/, on a host. On a device the threads would find little to do in parallel.
#pragma once

#include <warploom/host_planner/assigning_order.hpp>
#include <warploom/host_planner/levelling.hpp>
#include <warploom/planner/role_plan.hpp>

namespace warploom {

template <class K, class Team>
class Dealing {
  using Params = typename K::Params;
  using WorkItem = typename K::WorkItem;
  using Tiles = QueryTiles<K, Team>;

 public:
  // Deals `tiles` to the `active_ctas` CTAs of `p`.
  WL_FN Dealing(const Params& p, Tiles& tiles, Team& team, char* memory)
      : p_(p),
        tiles_(tiles),
        team_(team),
        order_(p, tiles, team, memory),
        s_(p, order_.scratch_end()),
        level_(p, s_.level) {}

  WL_FN char* scratch_end() const { return level_.scratch_end(); }

  // Gives all items to CTAs; call it after count_visible(). Pieces that level loads go to the CTAs
  // with the least to do. With leaves_some they become shared lists of one piece each instead, for
  // CTAs that are done early; if there are no pieces, so does the last item of each CTA that has
  // several.
  WL_FN void assign(bool leaves_some) {
    items_ = tiles_.tiles() * p_.num_kv_heads;
    wide total = 0;
    for (int t = 0; t < tiles_.tiles(); ++t) total += cost(t);
    const wide mean = (total * p_.num_kv_heads + p_.active_ctas - 1) / p_.active_ctas;
    order_.write_longest_first(s_.items, mean);
    deal();
    for (int cta = 0; cta < p_.active_ctas; ++cta) {
      level_.tiles(cta) = tiles_.visible(s_.items[s_.last[cta]].tile);
    }
    level_.find(s_.queue, mean);
    shared_ = 0;
    if (leaves_some) leave();
  }

  WL_FN PlanTotals totals() const {
    const int pieces = level_.pieces(), owners = level_.owners();
    return {items_ + pieces, owners, pieces + owners};
  }
  WL_FN OwnAndShared lists() const { return {p_.active_ctas, shared_}; }
  WL_FN int own_items() const { return totals().items - shared_; }

  // Writes where own lists begin, from list `own` on, and shared lists, from list `shared` on.
  WL_FN void write_indptr(int own, int shared, const Offsets& offsets) {
    const int ctas = p_.active_ctas;
    for (int cta = 0; cta <= ctas; ++cta) s_.count[cta] = 0;
    for (int i = 0; i < items_; ++i) s_.count[s_.items[i].cta + 1] += !is_left(i);
    for (int i = 0; shared_ == 0 && i < level_.pieces(); ++i) ++s_.count[level_.piece(i).cta + 1];
    s_.count[0] = offsets.item;
    for (int cta = 0; cta < ctas; ++cta) s_.count[cta + 1] += s_.count[cta];
    for (int cta = 0; cta < ctas; ++cta) p_.cta_indptr[own + cta] = s_.count[cta];
    const int behind = offsets.shared_item + own_items();
    for (int i = 0; i < shared_; ++i) p_.cta_indptr[shared + i] = behind + i;
  }

  // Writes items and merges after write_indptr(). In each list partial items come first: the item
  // whose end was cut off, then pieces. This role's slots and merges are the plan's first.
  WL_FN void write_items(int own, int shared) {
    for (int i = 0; i < shared_; ++i) s_.place[s_.order[i]] = p_.cta_indptr[shared + i];
    write_owners();
    write_pieces();
    for (int i = 0; i < items_; ++i) {
      const Item& item = s_.items[i];
      if (is_cut(i)) continue;
      const WorkItem work = tiles_.work(item.tile, item.head);
      if (is_left(i)) {
        items()[s_.place[item.cta]] = work;
      } else {
        write(item.cta, work);
      }
    }
    for (int cta = 0, begin = p_.cta_indptr[own]; cta < p_.active_ctas; ++cta) {
      if (begin < s_.count[cta]) write_opening(own + cta, items()[begin]);
      begin = s_.count[cta];  // the list is full: the next one begins there
    }
    for (int i = 0; i < shared_; ++i) write_opening(shared + i, items()[s_.place[s_.order[i]]]);
  }

 private:
  static constexpr wide kMost = 0x7fffffffffffffff;

  using Item = DealtItem;
  struct Arrays {
    wide* queue;    // [ctas + 1] `queued` loads; the last entry is above all
    wide* by_size;  // [4 * ctas] shared pieces or items, and room to sort them
    Item* items;    // [items] in the order in which they are assigned
    int* last;      // [ctas] the last item of each CTA
    int* count;     // [ctas + 1] where the next item of each CTA's list goes
    int* dealt;     // [ctas] how many items each CTA has
    int* order;     // [2 * ctas] shared pieces, or CTAs whose last item is; longest first
    int* place;     // [2 * ctas] index of each shared piece or item among items
    char* level;

    WL_FN Arrays(const Params& p, char* memory) {
      Memory free(memory);
      const long long most = (long long)(p.max_tiles) * p.num_kv_heads;
      free.take(queue, p.num_ctas + 1);
      free.take(by_size, 4 * p.num_ctas);
      free.take(items, most);
      free.take(last, p.num_ctas);
      free.take(count, p.num_ctas + 1);
      free.take(dealt, p.num_ctas);
      free.take(order, 2 * p.num_ctas);
      free.take(place, 2 * p.num_ctas);
      level = free.end();
    }
  };

  WL_FN wide cost(int tile) const { return cost_of_chunk(p_, tiles_.visible(tile)); }

  // Gives every item, in order, to the (first) CTA with the least load (Algorithm 1).
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

  // Which child is less cannot be predicted, so it is chosen by a sum and not by a branch.
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

  // Finds the pieces, or whole items, that CTAs leave to be claimed.
  WL_FN void leave() {
    const auto add = [this](int visible, int number) {
      s_.by_size[shared_++] = wide(0x7fffffff - visible) << 32 | number;
    };
    for (int i = 0; i < level_.pieces(); ++i) add(level_.piece(i).end - level_.piece(i).begin, i);
    leaves_whole_ = level_.pieces() == 0;
    if (leaves_whole_) {
      for (int cta = 0; cta < p_.active_ctas; ++cta) s_.dealt[cta] = 0;
      for (int i = 0; i < items_; ++i) ++s_.dealt[s_.items[i].cta];
      for (int cta = 0; cta < p_.active_ctas; ++cta) {
        if (s_.dealt[cta] > 1) add(tiles_.visible(s_.items[s_.last[cta]].tile), cta);
      }
    }
    const wide* const falling = team_.sort(s_.by_size, shared_);
    for (int i = 0; i < shared_; ++i) s_.order[i] = int(falling[i]);
  }
  // Whether this is a CTA's last item, and the CTA leaves it whole to be claimed.
  WL_FN bool is_left(int item) const {
    const int cta = s_.items[item].cta;
    return leaves_whole_ && s_.last[cta] == item && s_.dealt[cta] > 1;
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
      WorkItem work = tiles_.work(item.tile, item.head);
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
      const int slot = i + merge + 1;  // the slot before the first piece's is the owner's
      const Item& item = s_.items[s_.last[piece.owner]];
      WorkItem work = tiles_.work(item.tile, item.head);
      work.kv_begin = key_after(i);
      if (piece.end < tiles_.visible(item.tile)) work.kv_end = key_after(i + 1);
      work.slot = slot;
      work.merge = merge;
      if (shared_ > 0) {  // then the pieces are shared
        items()[s_.place[i]] = work;
      } else {
        write(piece.cta, work);
      }
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
    return tiles_.key_after(s_.items[s_.last[piece.owner]].tile, piece.begin);
  }

  WL_FN WorkItem* items() const { return reinterpret_cast<WorkItem*>(p_.items); }
  WL_FN void write(int cta, const WorkItem& work) { items()[s_.count[cta]++] = work; }
  WL_FN void write_opening(int list, const WorkItem& work) {
    Opening<K>& opening = reinterpret_cast<Opening<K>*>(p_.openings)[list];
    opening.item = work;
    opening.segment = Batch<Params>{p_}.template segment<typename K::Segment>(work.segment);
  }

  const Params& p_;
  Tiles& tiles_;
  Team& team_;
  AssigningOrder<K, Team> order_;
  Arrays s_;
  Levelling<Params> level_;
  int items_ = 0, shared_ = 0;  // shared lists
  bool leaves_whole_ = false;
};

}  // namespace warploom
