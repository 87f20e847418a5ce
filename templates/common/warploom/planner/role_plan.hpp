// The plan of one role: the items of one tile shape, for the CTAs or lists that its RoleShape
// names. It computes where lines are cut, then writes items and their merges. A plan of two roles
// has two RolePlans.
#pragma once

#include <warploom/planner/query_tiles.hpp>

#include <warploom/planner/line.hpp>

namespace warploom {

// Totals of the plan of one role, or of both.
struct PlanTotals {
  int items, merges, slots;
};

template <class K, class Team>
class RolePlan : public QueryTiles<K, Team> {
  using Base = QueryTiles<K, Team>;
  using Params = typename K::Params;
  using Segment = typename K::Segment;
  using WorkItem = typename K::WorkItem;
  using Merge = typename K::Merge;

 public:
  using Base::key_after, Base::work;

  WL_FN RolePlan(const Params& p, const RoleShape& shape, Team& team, char* memory)
      : Base(p, shape, team, memory), marks_(s_.marks) {}

  // Puts the tiles on a line with `heads` heads. Call it after count_visible().
  WL_FN Line<Params, Team> line_of(int heads) {
    heads_ = heads;  // for prefills take_cuts() sets the same: a device needs no register for it
    Line<Params, Team> line(p_, z_, team_, s_, tiles_, heads);
    line.place_tiles(has_several_);
    return line;
  }

  // Shares prefills of all heads out among `ctas` CTAs. Whether there are no decodes (is_alone)
  // matters only to classes that replace this one, such as DealtPrefills.
  WL_FN void partition_prefills(Line<Params, Team>& line, int ctas, bool /* is_alone */) {
    line.cut_prefills(ctas);
    take_cuts(line, 1);
  }

  // Takes the boundaries of `line` for `lines` equal lines.
  WL_FN void take_cuts(const Line<Params, Team>& line, int lines) {
    lines_ = lines;
    slices_ = line.slices();
    heads_ = line.heads();
    marks_ = line.boundaries();
    is_by_tile_ = line.is_by_tile();
    run_of_item_ = Steps<int>(run());
    count_cuts();
  }

  WL_FN PlanTotals totals() const {
    const CutCount line = cuts_of_line();
    return {lines_ * (items() + line.cuts), lines_ * line.opens, lines_ * (line.cuts + line.opens)};
  }
  // Numbers of own and shared lists, and of items in CTAs' own lists: 0 if there are no tiles.
  WL_FN OwnAndShared lists() const {
    if (tiles_ == 0) return {0, 0};
    return {lines_ * slices_.own, lines_ * slices_.shared};
  }
  WL_FN int own_items() const { return tiles_ > 0 ? lines_ * items_before(slices_.own) : 0; }

  // Writes where the lists of all slices begin (cta_indptr).
  WL_FN void write_indptr(const Offsets& offsets = {}) {
    if (tiles_ == 0) return;
    offsets_ = offsets;
    const Range lines = {0, lines_};
    team_.each(team_.range(slices()), [&](int i) {
      const Slice here = slice(i);
      int* const begins = p_.cta_indptr + list_index(i, 0);
      team_.each(lines, [&](int line) { begins[line] = here.begin + line * here.items; });
    });
  }

  // A host writes slice by slice. On a device, different warps write pieces and whole items side by
  // side; the thread that writes the first item of a list also writes the list's opening.
  WL_FN void write_items(const Offsets& offsets = {}) {
    if (tiles_ == 0) return;
    offsets_ = offsets;
    if constexpr (Team::kIsHost) {
      write_in_order();
    } else {
      run_of_item_ = Steps<int>(run());  // kept since take_cuts(), it would take registers
      team_.each_line(slices(), lines_, [&](int i, Range lines) { write_pieces(i, lines); });
      write_side_by_side();
    }
  }

 private:
  using Base::p_, Base::z_, Base::team_, Base::s_, Base::batch_, Base::tiles_, Base::has_several_;

  // Numbers the cuts along the line, and finds the key of each cut.
  WL_FN void count_cuts() {
    const Range mine = team_.range(slices() + 1);
    wide found = 0, total = 0;
    team_.each(mine, [&](int i) { found += cut_at(i); });
    wide before = team_.before(found, total);
    team_.each(mine, [&](int i) {
      before += cut_at(i);
      s_.counts[i] = {int(before), int(before >> 32)};
    });
    // in a loop of its own, for the mask takes all registers that a device has
    team_.each(mine, [&](int i) {
      if (marks_[i].visible == 0) return;
      s_.cut_key[i] = key_after(tile_head(marks_[i].item).tile, marks_[i].visible);
    });
    team_.sync();
  }

  // Counts of a whole line. They are read again at each use: a device has no registers for them.
  WL_FN CutCount cuts_of_line() const { return tiles_ > 0 ? s_.counts[slices()] : CutCount{0, 0}; }

  // Lower half: 1 if boundary i makes a new cut in an item. Upper half (2^32): 1 if boundary i is
  // also the first to cut that item.
  WL_FN wide cut_at(int i) const {
    const Mark mark = marks_[i];
    if (mark.visible == 0) return 0;
    const Mark before = marks_[i - 1];  // boundary 0 cuts nothing
    if (before.item != mark.item || before.visible == 0) return (wide(1) << 32) + 1;
    return before.visible != mark.visible;
  }

  WL_FN int slices() const { return slices_.own + slices_.shared; }
  // The number of the list of slice i on this line.
  WL_FN int list_index(int i, int line) const {
    const int cta = i * lines_ + line, own = lines_ * slices_.own;
    return cta < own ? z_.own_lists + offsets_.cta + cta : z_.shared_lists + cta - own;
  }
  // Items before slice i on one line.
  WL_FN int items_before(int i) const { return marks_[i].item + s_.counts[i].cuts; }

  // A slice: its first item on the first line, and its items on each line. lead: 1 if its first
  // item is the rest of an item that its begin cuts. opens: 1 if it has the first piece of an item
  // that its end is the first boundary to cut.
  struct Slice {
    int begin, items, lead, opens;
  };
  WL_FN Slice slice(int i) const {
    const Mark first = marks_[i], last = marks_[i + 1];
    const int begin = items_before(i);
    const int offset = i < slices_.own ? offsets_.item : offsets_.shared_item;
    return {offset + lines_ * begin, items_before(i + 1) - begin, first.visible > 0,
            last.visible > 0 && (last.item > first.item || first.visible == 0)};
  }

  // The tile and the head of an item. A line consists of runs: all tiles of a head, or all heads of
  // a tile. An item is at place `within` of run `number`.
  struct TileHead {
    int tile, head;
  };
  WL_FN int run() const { return is_by_tile_ ? heads_ : tiles_; }
  WL_FN int items() const { return tiles_ * heads_; }  // of a line
  WL_FN TileHead tile_head(int number, int within) const {
    return {s_.order[is_by_tile_ ? number : within], is_by_tile_ ? within : number};
  }
  WL_FN TileHead tile_head(int item) const {
    const int number = run_of_item_.of(item);
    return tile_head(number, item - number * run());
  }
  WL_FN WorkItem work(TileHead of) const { return work(of.tile, of.head); }
  WL_FN WorkItem item_of(int item) const { return work(tile_head(item)); }
  // The head is written last, so that `work` stays in registers from head to head.
  WL_FN WorkItem& write(int index, const WorkItem& work, int kv_head) {
    WorkItem& item = reinterpret_cast<WorkItem*>(p_.items)[index];
    item = work;
    item.kv_head = kv_head;
    return item;
  }

  // Writes the opening of slice i's list on this line; `work` is its item on the first line.
  WL_FN void write_opening(int i, int line, const WorkItem& work) {
    Opening<K>& opening = reinterpret_cast<Opening<K>*>(p_.openings)[list_index(i, line)];
    opening.item = work;
    opening.item.kv_head = work.kv_head + line;
    opening.segment = batch_.template segment<Segment>(work.segment);
  }

  // State of a single thread (a host) that walks along the line.
  struct Walk {
    int run;                     // items of a run
    int slot, merge;             // of the next piece; of the item that was cut last
    int number = 0, within = 0;  // of the next item, as in `tile_head`
    TileHead cut = {0, 0};       // the item that was cut last
    int first_slot = 0;          // of that item's pieces
  };
  WL_FN TileHead next(Walk& walk) const {
    const TileHead found = tile_head(walk.number, walk.within);
    if (++walk.within == walk.run) walk.within = 0, ++walk.number;
    return found;
  }

  // Writes all items in their order on the line. The walk remembers the item that the last boundary
  // cut, so nothing has to be searched.
  WL_FN void write_in_order() {
    Walk walk{run(), offsets_.slot, offsets_.merge - 1};
    for (int i = 0, end = slices(); i < end; ++i) write_slice(i, walk);
    write_openings(z_.own_lists + offsets_.cta, lists().own);
    write_openings(z_.shared_lists, lists().shared);
  }
  WL_FN void write_slice(int i, Walk& walk) {
    const Slice here = slice(i);
    if (here.items == 0) return;
    if (here.lead) {
      WorkItem piece = work(walk.cut);
      piece.kv_begin = s_.cut_key[i];
      if (marks_[i + 1].item == marks_[i].item) piece.kv_end = s_.cut_key[i + 1];
      write_next_piece(here, 0, piece, walk);
    }
    write_whole(here, walk);
    if (here.opens) {
      walk.cut = next(walk);
      walk.first_slot = walk.slot, ++walk.merge;
      WorkItem piece = work(walk.cut);
      piece.kv_end = s_.cut_key[i + 1];
      write_next_piece(here, here.lead, piece, walk);
    }
  }
  // A single thread writes faster to neighbouring items than from line to line.
  WL_FN void write_whole(const Slice& here, Walk& walk) {
    const int pieces = here.lead + here.opens, count = here.items - pieces, lines = lines_;
    WorkItem* const items = reinterpret_cast<WorkItem*>(p_.items) + here.begin + pieces;
    for (int n = 0; n < count; ++n) items[n] = work(next(walk));
    for (int line = 1; line < lines; ++line) {
      team_.copy_items(items, items + line * here.items, count, line);
    }
  }
  // Writes a piece, and updates its merge with the slots known so far.
  WL_FN void write_next_piece(const Slice& here, int piece, WorkItem work, Walk& walk) {
    const CutCount all = cuts_of_line();
    const int slots = all.cuts + all.opens, kv_head = work.kv_head, lines = lines_;
    for (int line = 0; line < lines; ++line) {
      work.slot = walk.slot + line * slots;
      work.merge = walk.merge + line * all.opens;
      write(here.begin + line * here.items + piece, work, kv_head + line);
      Merge& merge = reinterpret_cast<Merge*>(p_.merges)[work.merge];
      merge.first_slot = walk.first_slot + line * slots;
      merge.num_slots = walk.slot - walk.first_slot + 1;
    }
    ++walk.slot;
  }

  // Writes the openings of `count` lists: copies of items and segments, which are written.
  WL_FN void write_openings(int list, int count) {
    const auto* const items = reinterpret_cast<const WorkItem*>(p_.items);
    const auto* const segments = reinterpret_cast<const Segment*>(p_.segments);
    auto* const openings = reinterpret_cast<Opening<K>*>(p_.openings);
    for (const int end = list + count; list < end; ++list) {
      const int first = p_.cta_indptr[list];
      if (first == p_.cta_indptr[list + 1]) continue;
      openings[list].item = items[first];
      openings[list].segment = segments[items[first].segment];
    }
  }

  // Writes all whole items.
  WL_FN void write_side_by_side() {
    const auto first_whole = [this](int i) { return marks_[i].item + (marks_[i].visible > 0); };
    int i = -1;  // slice of the item; items ascend
    const auto write_whole = [&](int item, Range lines) {
      if (i < 0) i = last_not_above(slices(), item, first_whole);
      while (i + 1 < slices() && first_whole(i + 1) <= item) ++i;
      if (marks_[i + 1].item <= item) return;  // the item is cut
      const Slice here = slice(i);
      const WorkItem work = item_of(item);
      const int before = here.opens + item - marks_[i].item;  // items of the list before this one
      for (int line = lines.begin; line < lines.end; ++line) {
        write(here.begin + before + line * here.items, work, work.kv_head + line);
        if (before == 0) write_opening(i, line, work);
      }
    };
    team_.each_line(items(), lines_, write_whole, slices());
  }

  // Writes slice i's partial items, which come first in each list, and the merge that it opens.
  WL_FN void write_pieces(int i, Range lines) {
    const Slice here = slice(i);
    if (here.items == 0) return;
    for (int piece = 0; piece < here.lead + here.opens; ++piece) {
      const bool leads = here.lead && piece == 0;
      write_piece(i, here, piece, leads, lines);
      if (!leads) write_merge(i + 1, lines);
    }
  }

  // Writes a piece of slice i. One that leads is the rest of an item that boundary i cuts, up to
  // the next boundary or the item's end. Any other piece begins the item that the next boundary
  // cuts.
  WL_FN void write_piece(int i, const Slice& here, int piece, bool leads, Range lines) {
    const int item_index = leads ? marks_[i].item : marks_[i + 1].item;
    WorkItem work = item_of(item_index);
    if (leads) work.kv_begin = s_.cut_key[i];
    if (marks_[i + 1].item == item_index) work.kv_end = s_.cut_key[i + 1];
    const CutCount count = s_.counts[leads ? i : i + 1];
    const int slot = offsets_.slot + count.cuts + count.opens - (leads ? 1 : 2);
    const int merge = offsets_.merge + count.opens - 1;
    const int kv_head = work.kv_head;
    const CutCount all = cuts_of_line();
    team_.each(lines, [&](int line) {
      work.slot = slot + line * (all.cuts + all.opens);
      work.merge = merge + line * all.opens;
      write(here.begin + line * here.items + piece, work, kv_head + line);
      if (piece == 0) write_opening(i, line, work);
    });
  }

  // Writes the merge of the item that boundary i is the first to cut.
  WL_FN void write_merge(int i, Range lines) {
    const CutCount count = s_.counts[i];
    const auto item = [this, i](int further) { return marks_[i + further].item; };
    const int most = slices() + 1 - i;
    int reach = 1;  // few boundaries cut one item
    while (reach < most && item(reach) <= marks_[i].item) reach *= 2;
    const int last = i + last_not_above(min(reach, most), marks_[i].item, item);
    const int num_slots = s_.counts[last].cuts - count.cuts + 2;
    const int first_slot = offsets_.slot + count.cuts + count.opens - 2;
    Merge* const merges = reinterpret_cast<Merge*>(p_.merges) + offsets_.merge + count.opens - 1;
    const CutCount all = cuts_of_line();
    team_.each(lines, [&](int line) {
      merges[line * all.opens].first_slot = first_slot + line * (all.cuts + all.opens);
      merges[line * all.opens].num_slots = num_slots;
    });
  }

  int lines_ = 1, heads_ = 0;  // heads of a line
  // Set by take_cuts(), which a role without tiles never calls: with a value before it, a device
  // would spill a register. The public functions ask for tiles before they read it.
  OwnAndShared slices_;
  Offsets offsets_;
  bool is_by_tile_ = false;
  mutable Steps<int> run_of_item_{0};
  const Mark* marks_;
};

}  // namespace warploom
