// Plans a batch: the even dealing of scheduler/even.py, by a team of threads (a host has a team of
// one). Every team works out where the line is cut; then all teams write the plan together.
#pragma once

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
    const PlanStatus status = count_tiles();
    if (status != PlanStatus::kGood) {
      write_empty(int(status));
      return status;
    }
    if (tiles_ == 0) {
      write_segments();
      write_blocks();
      write_empty(0);
      return status;
    }
    ask_mask();
    Line<K, Team> line(p_, team_, s_, tiles_);
    line.lay(has_several_);
    line.choose();
    items_ = line.items();
    marks_ = line.best();
    count_cuts();
    write_segments();
    write_blocks();
    write_header({0, p_.num_requests, p_.lines * total_.opens,
                  p_.lines * (total_.cuts + total_.opens), p_.lines * (items_ + total_.cuts)});
    write_ctas();
    write_whole_items();
    write_pieces();
    return status;
  }

 private:
  struct Totals {
    int status, segments, merges, slots, items;
  };

  WL_FN PlanStatus count_tiles() {
    const Range mine = team_.range(p_.num_requests);
    int wrong = 0;
    bool several = false;
    wide tiles = 0, total = 0;
    for (int r = mine.begin; r < mine.end && wrong == 0; ++r) {
      wrong = int(batch_.check(r));
      const int own = batch_.tiles(r);
      tiles += own;
      several |= own > 1;
    }
    wrong = int(team_.max(wrong));
    if (wrong != 0) return PlanStatus(wrong);
    if constexpr (!Team::kIsMeasured) {
      if (has_negative_page()) return PlanStatus::kPage;
    }
    has_several_ = team_.max(several) != 0;
    int first = int(team_.before(tiles, total));
    for (int r = mine.begin; r < mine.end; ++r) {
      s_.first_tile[r] = first;
      first += batch_.tiles(r);
    }
    tiles_ = int(total);
    if (team_.is_first()) s_.first_tile[p_.num_requests] = tiles_;
    team_.sync();
    return PlanStatus::kGood;
  }

  // Only where `kv_indptr` is right. Every team looks at all pages, for none can ask the others.
  WL_FN bool has_negative_page() {
    if (!batch_.is_paged() || p_.kv_indices == nullptr) return false;
    const int* const pages = p_.kv_indices;
    const Range mine = team_.range(p_.kv_indptr[p_.num_requests]);
    bool found = false;
    for (int i = mine.begin; i < mine.end; ++i) found |= pages[i] < 0;
    return team_.max(found) != 0;
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
    const Range mine = team_.range(tiles_);
    int segment = -1;
    for (int t = mine.begin; t < mine.end; ++t) {
      if (segment < 0) {
        segment = last_not_above(p_.num_requests, t, [this](int r) { return s_.first_tile[r]; });
      }
      while (s_.first_tile[segment + 1] <= t) ++segment;
      s_.segment[t] = segment;
      MaskOracle<K> mask = mask_of(t);
      const Range keys = mask.bounds();
      const int visible = mask.visible(keys);
      s_.keys[t] = visible > 0 ? keys : Range{0, 0};
      s_.visible[t] = visible;
    }
    team_.sync();
  }

  // Numbers the cuts along the line, and finds the key of each.
  WL_FN void count_cuts() {
    const Range mine = team_.range(p_.columns + 1);
    wide found = 0, total = 0;
    for (int i = mine.begin; i < mine.end; ++i) found += cut_at(i);
    wide before = team_.before(found, total);
    for (int i = mine.begin; i < mine.end; ++i) {
      before += cut_at(i);
      s_.counts[i] = {int(before), int(before >> 32)};
      if (marks_[i].visible > 0) {
        const int t = s_.order[marks_[i].item % tiles_];
        s_.cut_key[i] = mask_of(t).key_after(s_.keys[t], s_.visible[t], marks_[i].visible);
      }
    }
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
    const Range mine = team_.part(p_.num_requests);
    for (int r = mine.begin; r < mine.end; ++r) {
      reinterpret_cast<Segment*>(p_.segments)[r] = batch_.template segment<Segment>(r);
    }
  }

  WL_FN void write_blocks() {
    if (!batch_.is_paged() || p_.kv_indices == nullptr) return;
    const Range mine = team_.part(p_.kv_indptr[p_.num_requests]);
    const int* const from = p_.kv_indices;  // copies, so that the loop can use vectors
    int* const to = p_.indices;
    for (int i = mine.begin; i < mine.end; ++i) to[i] = from[i];
  }

  WL_FN void write_header(const Totals& totals) {
    if (!team_.is_first_of_all()) return;
    typename K::PlanHeader header = {};
    header.num_items = totals.items;
    header.num_segments = totals.segments;
    header.num_merges = totals.merges;
    header.num_slots = totals.slots;
    header.status = totals.status;
    *reinterpret_cast<typename K::PlanHeader*>(p_.header) = header;
  }

  WL_FN void write_empty(int status) {
    write_header({status, status == 0 ? p_.num_requests : 0, 0, 0, 0});
    const Range mine = team_.part(p_.num_ctas + 1);
    for (int cta = mine.begin; cta < mine.end; ++cta) p_.cta_indptr[cta] = 0;
  }

  WL_FN void write_ctas() {
    const Range mine = team_.part(p_.columns + 1);
    for (int i = mine.begin; i < mine.end; ++i) {
      if (i == p_.columns) {
        for (int cta = i * p_.lines; cta <= p_.num_ctas; ++cta) {
          p_.cta_indptr[cta] = p_.lines * (items_ + total_.cuts);
        }
        continue;
      }
      const Column here = column(i);
      for (int line = 0; line < p_.lines; ++line) {
        p_.cta_indptr[i * p_.lines + line] = here.begin + line * here.items;
      }
    }
  }

  WL_FN WorkItem item_of(int item) const {
    const int t = s_.order[item % tiles_], segment = s_.segment[t];
    WorkItem work = {};
    work.segment = segment;
    work.kv_head = item / tiles_;
    work.row_begin = tile(t, segment).row_begin;
    work.kv_begin = s_.keys[t].begin;
    work.kv_end = s_.keys[t].end;
    work.slot = work.merge = -1;
    return work;
  }
  // The head is written last, so that `work` stays in registers from head to head.
  WL_FN WorkItem& write(int index, const WorkItem& work, int kv_head) {
    WorkItem& item = reinterpret_cast<WorkItem*>(p_.items)[index];
    item = work;
    item.kv_head = kv_head;
    return item;
  }

  WL_FN void write_whole_items() {
    const auto first_whole = [this](int i) { return marks_[i].item + (marks_[i].visible > 0); };
    const Range mine = team_.part(items_ * p_.lines);
    if (mine.begin >= mine.end) return;
    int item = mine.begin / p_.lines, line = mine.begin % p_.lines;
    int i = last_not_above(p_.columns, item, first_whole);
    for (int left = mine.end - mine.begin; left > 0; ++item, line = 0) {
      while (i + 1 < p_.columns && first_whole(i + 1) <= item) ++i;
      const int end = min(p_.lines, line + left);
      left -= end - line;
      if (marks_[i + 1].item <= item) continue;  // it is cut
      const Column here = column(i);
      const WorkItem work = item_of(item);
      const int place = here.begin + here.trail + item - marks_[i].item;
      for (; line < end; ++line) {
        write(place + line * here.items, work, work.kv_head + line);
      }
    }
  }

  // Partial items, which come first in each CTA, and the merges of those that open one.
  WL_FN void write_pieces() {
    const Range mine = team_.part(p_.columns);
    for (int i = mine.begin; i < mine.end; ++i) {
      const Mark first = marks_[i], last = marks_[i + 1];
      const Column here = column(i);
      if (here.items == 0) continue;
      if (here.lead) {
        WorkItem work = item_of(first.item);
        work.kv_begin = s_.cut_key[i];
        if (last.item == first.item) work.kv_end = s_.cut_key[i + 1];
        const CutCount count = s_.counts[i];
        write_piece(here, 0, work, count.cuts + count.opens - 1, count.opens - 1);
      } else if (last.item == first.item || here.trail) {
        WorkItem work = item_of(last.item);
        work.kv_end = s_.cut_key[i + 1];
        const CutCount count = s_.counts[i + 1];
        write_piece(here, 0, work, count.cuts + count.opens - 2, count.opens - 1);
        write_merge(i + 1);
      }
      if (here.lead && here.trail) {
        WorkItem work = item_of(last.item);
        work.kv_end = s_.cut_key[i + 1];
        const CutCount count = s_.counts[i + 1];
        write_piece(here, 1, work, count.cuts + count.opens - 2, count.opens - 1);
        write_merge(i + 1);
      }
    }
  }

  WL_FN void write_piece(const Column& here, int place, const WorkItem& work, int slot, int merge) {
    for (int line = 0; line < p_.lines; ++line) {
      WorkItem& item = write(here.begin + line * here.items + place, work, work.kv_head + line);
      item.slot = slot + line * (total_.cuts + total_.opens);
      item.merge = merge + line * total_.opens;
    }
  }

  // The merge of the item that boundary i is the first to cut.
  WL_FN void write_merge(int i) {
    const CutCount count = s_.counts[i];
    const int last = i + last_not_above(p_.columns + 1 - i, marks_[i].item, [this, i](int further) {
                       return marks_[i + further].item;
                     });
    Merge merge;
    merge.first_slot = count.cuts + count.opens - 2;
    merge.num_slots = s_.counts[last].cuts - count.cuts + 2;
    for (int line = 0; line < p_.lines; ++line) {
      reinterpret_cast<Merge*>(p_.merges)[line * total_.opens + count.opens - 1] = merge;
      merge.first_slot += total_.cuts + total_.opens;
    }
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
