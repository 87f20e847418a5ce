// Plans a batch: the Stream-K partition of scheduler/stream_k.py, by a team of threads (a host has
// a team of one). Every team works out where the line is cut; then all teams write the plan
// together. None waits for another: the last to have looked at its share of the pages signs the
// plan.
#pragma once

#include <warploom/opening.hpp>
#include <warploom/planner/batch.hpp>
#include <warploom/planner/scratch.hpp>
#include <warploom/planner/tiles.hpp>

#include <warploom/planner/line.hpp>

namespace warploom {

template <class K, class Team>
class Planner {
  using Params = typename K::Params;
  using Segment = typename K::Segment;
  using WorkItem = typename K::WorkItem;
  using Merge = typename K::Merge;

 public:
  WL_FN Planner(const Params& p, Team& team, char* memory)
      : p_(p), team_(team), s_(p, memory), batch_{p} {}

  // Returns what is wrong with the batch; then the plan is empty, and says so in its header.
  WL_FN PlanStatus run() {
    PlanStatus status = count_tiles();
    if (status != PlanStatus::kGood) {
      if (team_.is_first_team()) sign(status);
      return status;
    }
    team_.vote(write_blocks());
    if (tiles_ > 0) assign();
    bool has_negative = false;  // of all pages, which the last team knows
    const bool is_last = team_.is_last(has_negative);
    if (has_negative) status = PlanStatus::kPage;
    if (is_last) sign(status);
    write_segments();
    if (tiles_ > 0) write_items();
    return status;
  }

 private:
  struct Totals {
    int status, segments, merges, slots, items;
  };

  WL_FN PlanStatus count_tiles() {
    const Range mine = team_.range(p_.num_requests);
    int wrong = 0, tiles = 0;
    bool several = false;
    if (!Team::kIsHost && p_.num_requests == 0) wrong = int(batch_.check_empty());
    team_.each(mine, [&](int r) {
      if (!Team::kIsHost && wrong == 0) wrong = int(batch_.check(r));
      const int own = wrong == 0 ? batch_.tiles(r) : 0;
      tiles += own;
      several |= own > 1;
    });
    if (team_.any(wrong != 0)) return worst(wrong);
    has_several_ = team_.any(several);
    wide total = 0;
    int first = int(team_.before(tiles, total));
    team_.each(mine, [&](int r) {
      s_.first_tile[r] = first;
      first += batch_.tiles(r);
    });
    tiles_ = int(total);
    if (team_.is_first()) s_.first_tile[p_.num_requests] = tiles_;
    team_.sync();
    return PlanStatus::kGood;
  }
  WL_FN PlanStatus worst(int wrong) const {
    int found = int(PlanStatus::kMaxBlocks);
    while (!team_.any(wrong == found)) --found;
    return PlanStatus(found);
  }

  // Works out the line and its cuts: every team does, for none waits for the others.
  WL_FN void assign() {
    ask_mask();
    Line<K, Team> line(p_, team_, s_, tiles_);
    line.lay(has_several_);
    line.choose();
    items_ = line.items();
    marks_ = line.best();
    count_cuts();
  }

  WL_FN QueryTile tile(int t, int segment) const {
    const int row = (s_.first_tile[segment + 1] - 1 - t) * p_.rows;  // the last rows come first
    const int fused = batch_.q_len(segment) * p_.group_size;
    return {segment, row, min(row + p_.rows, fused)};
  }
  WL_FN MaskOracle<K> mask_of(int t) const {
    const int segment = s_.segment[t];
    return {p_, tile(t, segment), batch_.q_len(segment), int(batch_.kv_len(segment))};
  }

  WL_FN void ask_mask() {
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

  // Numbers the cuts along the line, and finds the key of each.
  WL_FN void count_cuts() {
    const Range mine = team_.range(p_.columns + 1);
    wide found = 0, total = 0;
    team_.each(mine, [&](int i) { found += cut_at(i); });
    wide before = team_.before(found, total);
    team_.each(mine, [&](int i) {
      before += cut_at(i);
      s_.counts[i] = {int(before), int(before >> 32)};
      if (marks_[i].visible > 0) {
        const int t = tile_at(marks_[i].item);
        s_.cut_key[i] = mask_of(t).key_after(s_.keys[t], s_.visible[t], marks_[i].visible);
      }
    });
    total_ = {int(total), int(total >> 32)};
    team_.sync();
  }

  // 1 for a boundary that cuts an item where none before it does, and 2^32 if none before it cuts
  // that item at all.
  WL_FN wide cut_at(int i) const {
    const Mark mark = marks_[i];
    if (mark.visible == 0) return 0;
    const Mark before = marks_[i - 1];  // boundary 0 cuts nothing
    if (before.item != mark.item || before.visible == 0) return (wide(1) << 32) + 1;
    return before.visible != mark.visible;
  }

  // The CTAs of one column: how many items they have, of these partial ones at their begin and end.
  struct Column {
    int begin, items, lead, trail;
  };
  WL_FN Column column(int i) const {
    const Mark first = marks_[i], last = marks_[i + 1];
    const int begin = first.item + s_.counts[i].cuts;
    return {p_.lines * begin, last.item + s_.counts[i + 1].cuts - begin, first.visible > 0,
            last.visible > 0 && last.item > first.item};
  }

  WL_FN void write_segments() {
    team_.each_of_all(p_.num_requests, [&](int r) {
      reinterpret_cast<Segment*>(p_.segments)[r] = batch_.template segment<Segment>(r);
    });
  }

  // Only where `kv_indptr` is right. True if this thread has seen a negative page.
  WL_FN bool write_blocks() const {
    if (!batch_.is_paged() || p_.kv_indices == nullptr) return false;
    return team_.copy(p_.kv_indices, p_.indices, p_.kv_indptr[p_.num_requests]);
  }

  // Writes what a kernel reads first, and without which it does nothing.
  WL_FN void sign(PlanStatus status) {
    Totals totals = {int(status), 0, 0, 0, 0};
    if (status == PlanStatus::kGood) {
      totals = {0, p_.num_requests, p_.lines * total_.opens,
                p_.lines * (total_.cuts + total_.opens), p_.lines * (items_ + total_.cuts)};
    }
    if (team_.is_first()) write_header(totals);
    const int busy = totals.items > 0 ? p_.columns : 0;
    team_.each(team_.range(busy), [&](int i) {
      const Column here = column(i);
      team_.each({0, p_.lines}, [&](int line) {
        p_.cta_indptr[i * p_.lines + line] = here.begin + line * here.items;
      });
    });
    const int idle = busy * p_.lines;  // the first that has nothing to do
    team_.each(team_.range(p_.num_ctas + 1 - idle),
               [&](int i) { p_.cta_indptr[idle + i] = totals.items; });
  }

  WL_FN void write_header(const Totals& totals) {
    typename K::PlanHeader header = {};
    header.num_items = totals.items;
    header.num_segments = totals.segments;
    header.num_merges = totals.merges;
    header.num_slots = totals.slots;
    header.status = totals.status;
    *reinterpret_cast<typename K::PlanHeader*>(p_.header) = header;
  }

  WL_FN int tile_at(int item) const { return s_.order[item - head_of(p_, tiles_, item) * tiles_]; }
  WL_FN WorkItem item_of(int item) const {  // every member by name, as in Batch::segment
    const int t = tile_at(item), segment = s_.segment[t];
    WorkItem work;
    work.segment = segment;
    work.kv_head = head_of(p_, tiles_, item);
    work.row_begin = tile(t, segment).row_begin;
    work.kv_begin = s_.keys[t].begin;
    work.kv_end = s_.keys[t].end;
    work.slot = work.merge = -1;
    work.rows = 0;
    return work;
  }
  // The head is written last, so that `work` stays in registers from head to head.
  WL_FN WorkItem& write(int index, const WorkItem& work, int kv_head) {
    WorkItem& item = reinterpret_cast<WorkItem*>(p_.items)[index];
    item = work;
    item.kv_head = kv_head;
    return item;
  }

  // The first item of the CTA at this line of column i, of which `work` is that of the first line.
  WL_FN void write_opening(int i, int line, const WorkItem& work) {
    Opening<K>& opening = reinterpret_cast<Opening<K>*>(p_.openings)[i * p_.lines + line];
    opening.item = work;
    opening.item.kv_head = work.kv_head + line;
    opening.segment = batch_.template segment<Segment>(work.segment);
  }

  // A device writes pieces and whole items side by side, by different warps.
  WL_FN void write_items() {
    team_.each_line(p_.columns, p_.lines, [&](int i, Range lines) { write_pieces(i, lines); });
    if constexpr (Team::kIsHost) {
      team_.each({0, p_.columns}, [&](int i) { write_column(i); });
    } else {
      write_side_by_side();
    }
  }

  // The whole items of column i. A thread alone writes faster from neighbour to neighbour than from
  // line to line.
  WL_FN void write_column(int i) {
    const Column here = column(i);
    const int first = marks_[i].item + here.lead, whole = marks_[i + 1].item - first;
    WorkItem* const items = reinterpret_cast<WorkItem*>(p_.items) + here.begin + here.items - whole;
    for (int n = 0; n < whole; ++n) items[n] = item_of(first + n);
    for (int line = 1; line < p_.lines; ++line) {
      team_.copy_items(items, items + line * here.items, whole, line);
    }
    if (whole == 0 || whole < here.items) return;  // a piece comes first
    const WorkItem work = item_of(first);
    for (int line = 0; line < p_.lines; ++line) write_opening(i, line, work);
  }

  // All whole items.
  WL_FN void write_side_by_side() {
    const auto first_whole = [this](int i) { return marks_[i].item + (marks_[i].visible > 0); };
    int i = -1;  // column of the item; items ascend
    const auto write_whole = [&](int item, Range lines) {
      if (i < 0) i = last_not_above(p_.columns, item, first_whole);
      while (i + 1 < p_.columns && first_whole(i + 1) <= item) ++i;
      if (marks_[i + 1].item <= item) return;  // it is cut
      const Column here = column(i);
      const WorkItem work = item_of(item);
      const int before = here.trail + item - marks_[i].item;  // items of the CTA
      for (int line = lines.begin; line < lines.end; ++line) {
        write(here.begin + before + line * here.items, work, work.kv_head + line);
        if (before == 0) write_opening(i, line, work);
      }
    };
    team_.each_line(items_, p_.lines, write_whole, p_.columns);
  }

  // The partial items of column i, which come first in each CTA, and the merge that one opens.
  WL_FN void write_pieces(int i, Range lines) {
    const Mark first = marks_[i], last = marks_[i + 1];
    const Column here = column(i);
    if (here.items == 0) return;
    const bool opens = last.visible > 0 && (last.item > first.item || first.visible == 0);
    for (int piece = 0; piece < here.lead + opens; ++piece) {
      const bool leads = here.lead && piece == 0;
      write_piece(i, here, piece, leads, lines);
      if (!leads) write_merge(i + 1, lines);
    }
  }

  // The piece before boundary i + 1 opens its item; the one that leads ends there, or before.
  WL_FN void write_piece(int i, const Column& here, int piece, bool leads, Range lines) {
    const int item_index = leads ? marks_[i].item : marks_[i + 1].item;
    WorkItem work = item_of(item_index);
    if (leads) work.kv_begin = s_.cut_key[i];
    if (marks_[i + 1].item == item_index) work.kv_end = s_.cut_key[i + 1];
    const CutCount count = s_.counts[leads ? i : i + 1];
    const int slot = count.cuts + count.opens - (leads ? 1 : 2), merge = count.opens - 1;
    const int kv_head = work.kv_head;
    team_.each(lines, [&](int line) {
      work.slot = slot + line * (total_.cuts + total_.opens);
      work.merge = merge + line * total_.opens;
      write(here.begin + line * here.items + piece, work, kv_head + line);
      if (piece == 0) write_opening(i, line, work);
    });
  }

  // The merge of the item that boundary i is the first to cut.
  WL_FN void write_merge(int i, Range lines) {
    const CutCount count = s_.counts[i];
    const int last = i + last_not_above(p_.columns + 1 - i, marks_[i].item, [this, i](int further) {
                       return marks_[i + further].item;
                     });
    const int num_slots = s_.counts[last].cuts - count.cuts + 2;
    team_.each(lines, [&](int line) {
      Merge& merge = reinterpret_cast<Merge*>(p_.merges)[line * total_.opens + count.opens - 1];
      merge.first_slot = count.cuts + count.opens - 2 + line * (total_.cuts + total_.opens);
      merge.num_slots = num_slots;
    });
  }

  const Params& p_;
  Team& team_;
  Scratch s_;
  Batch<Params> batch_;
  int tiles_ = 0, items_ = 0;
  bool has_several_ = false;
  const Mark* marks_ = nullptr;
  CutCount total_ = {0, 0};
};

}  // namespace warploom
