// A line of work items, end to end, and where it is cut into slices:
// scheduler/partition/stream_k.py, for a team of threads or a single thread.
#pragma once

#include <warploom/planner/scratch.hpp>

namespace warploom {

template <class Params, class Team>
class Line {
 public:
  WL_FN Line(const Params& p, const RoleShape& z, Team& team, Scratch& scratch, int tiles,
             int heads)
      : p_(p),
        z_(z),
        team_(team),
        s_(scratch),
        tiles_(tiles),
        heads_(heads),
        head_of_item_(tiles),
        boundaries_(scratch.marks) {}

  WL_FN int items() const { return tiles_ * heads_; }
  WL_FN int heads() const { return heads_; }

  // Puts the tiles on the line in the order longest, shortest, second longest, ...; with
  // `keeps_order` (some segment has several tiles) in the order of their numbers.
  WL_FN void place_tiles(bool keeps_order) {
    const Range mine = team_.range(tiles_);
    if (keeps_order) {
      team_.each(mine, [&](int t) { s_.order[t] = t; });
    } else {
      team_.each(mine, [&](int t) { s_.sort[t] = wide(0x7ffffffe - s_.visible[t]) << 32 | t; });
      const wide* falling = team_.sort(s_.sort, tiles_);
      team_.each(mine, [&](int t) {
        s_.order[t] = int(falling[t % 2 == 0 ? t / 2 : tiles_ - 1 - t / 2]);
      });
    }
    wide cost = 0, total = 0;
    team_.each(mine, [&](int t) { cost += cost_of_chunk(z_, s_.visible[s_.order[t]]); });
    wide begin = team_.before(cost, total);
    team_.each(mine, [&](int t) {
      s_.begin[t] = begin;
      begin += cost_of_chunk(z_, s_.visible[s_.order[t]]);
    });
    head_length_ = total;
    head_at_ = Steps<wide>(total);
    team_.sync();
  }

  WL_FN wide length() const { return head_length_ * heads_; }
  // Changes how many heads the line has.
  WL_FN void set_heads(int heads) { heads_ = heads; }

  // Whether no item is worth cutting if `ctas` CTAs share the line.
  WL_FN bool is_short(int ctas) const { return p_.active_ctas > 1 && !has_long(least_cut(ctas)); }

  // Whether `cut_prefills` would cut the line into rounds of whole items and leave no round out,
  // provided that the rest of the line behind the rounds is long enough.
  WL_FN bool has_all_rounds(int ctas) const {
    return p_.active_ctas > 1 && !fit_cache() && rounds_of(ctas).are_all;
  }

  // Finds the boundaries of the slices that `ctas` CTAs own and, behind them, of the shared slices.
  // If no item is worth cutting, slices are lists of whole items. If the items read more keys than
  // the cache holds, slices are rounds of such lists. Else slices are equal.
  WL_FN void cut_prefills(int ctas) {
    const bool has_others = p_.active_ctas > 1;
    const bool is_whole = is_short(ctas);
    const bool fits = !has_others || fit_cache();
    Cuts cuts = {};
    if (is_whole) {
      is_by_tile_ = fits;
      cuts = whole_cuts(ctas);
    } else if (!fits) {
      cuts = round_cuts(ctas);
    }
    mark_slices(cuts.slices > 0 ? cuts : equal_cuts(ctas));
  }

  // The same for a line of decodes: `slices` own slices, and as many shared slices of each length.
  // It takes the most lengths with which a slice of the shortest length is, on average, worth
  // claiming. Returns false, and finds no boundaries, if two lengths are already too many.
  WL_FN bool cut_decodes(int slices) {
    const wide rest = length() / kPerSharedDecode;
    for (int lengths = kEnds; lengths > 1; --lengths) {
      if (rest < shortest_in(lengths) * slices * wide(p_.decode_claim)) continue;
      mark_slices({slices, slices, 0, length() - rest, slices, lengths});
      return true;
    }
    return false;
  }

  // Finds boundaries of `slices` slices: the option whose longest CTA is shortest.
  WL_FN void cut_balanced(int slices) {
    slices_ = {slices, 0};
    working_ = max(1, int(min(wide(slices), length() / least_slice())));
    fitting_ = fitting_slices(working_);
    mark(slices);
    team_.sync();
    static_assert(kOptions <= Team::kMostGroups, "room for the longest CTA of each option");
    const wide* const longest = team_.max_of_each(kOptions, slices, [&](int option, int i) {
      return load(s_.marks + option * (slices + 1) + i);
    });
    int best = 0;
    for (int option = 1; option < kOptions; ++option) {
      if (longest[option] < longest[best]) best = option;
    }
    boundaries_ = s_.marks + best * (slices + 1);
  }

  // True: on the line all heads of a tile come before the next tile, and no item is cut. False: all
  // tiles of a head come before the next head.
  WL_FN bool is_by_tile() const { return is_by_tile_; }

  // Numbers of own and shared slices between the boundaries that were found.
  WL_FN OwnAndShared slices() const { return slices_; }
  // Boundaries from 0 on; those behind the last CTA with work lie at the end of the line.
  WL_FN const Mark* boundaries() const { return boundaries_; }

 private:
  // Key tiles of the shortest item that is cut; see `RolePrices.shortest_cut`.
  WL_FN int least_cut(int ctas) const {
    const wide equal = quotient(length(), wide(z_.per_tile) * ctas), least = p_.shortest_cut;
    return int(min(least, equal + (least - 1) / kLate + 1));
  }
  WL_FN bool has_long(int visible) const {
    bool found = false;
    team_.each(team_.range(tiles_), [&](int t) { found |= s_.visible[t] >= visible; });
    return team_.any(found);
  }

  // Whether the cache holds the keys that all items read; a segment's keys count once a head.
  WL_FN bool fit_cache() const { return p_.cached_keys == 0 || keys() <= p_.cached_keys; }
  WL_FN wide keys() const {
    wide found = 0, total = 0;
    team_.each(team_.range(tiles_), [&](int t) {
      if (t == 0 || s_.segment[t] != s_.segment[t - 1]) found += s_.visible[t];
    });
    team_.before(found, total);
    return total * z_.keys * heads_;
  }

  // How a line is cut: `Cuts` of scheduler/partition/role_lists.py.
  struct Cuts {
    int own;                  // slices that CTAs own
    int slices, each;         // slices up to `end`, of `each` whole items; each = 0: equal slices
    wide end;                 // where they end on the line
    int per_length, lengths;  // slices behind `end`; each length is half the one before
  };
  WL_FN static wide shortest_in(int lengths) { return (wide(1) << lengths) - 1; }

  // Lists of whole items.
  WL_FN Cuts whole_cuts(int ctas) const {
    const int each = (items() - 1) / (ctas + (kPrefillSlices - 1) * p_.active_ctas) + 1;
    const int lists = (items() - 1) / each + 1;
    return {min(ctas, lists), lists, each, length(), 0, 1};
  }

  // Rounds of lists of whole items, and behind them `ends` slices of each of kEnds lengths. Nothing
  // if these slices would be too short, or if there are too few items for rounds.
  WL_FN Cuts round_cuts(int ctas) const {
    const Rounds rounds = rounds_of(ctas);
    if (rounds.lists == 0) return {};
    const wide end = position({rounds.each * rounds.lists, 0});
    const wide least = shortest_in(kEnds) * least_slice();
    const int ends = int(min(wide(ctas), quotient(length() - end, least)));
    if (ends == 0) return {};
    return {ctas, rounds.lists, rounds.each, end, ends, kEnds};
  }

  // Equal own slices of most of the line, and equal shared slices of the rest. If items are few,
  // own slices take the whole line, since the rest would be pieces of one or two items. Then all
  // items have equally many slices, unless too many CTAs would have none.
  WL_FN Cuts equal_cuts(int ctas) const {
    const wide rest = length() / kPerSharedPrefill, least = least_slice();
    if (2 * items() <= ctas) {
      const int all = max(1, int(min(wide(ctas), quotient(length(), least))));
      const int fitting = fitting_slices(all);
      const int own = (all - fitting) * kPerIdleOfFew <= all ? fitting : all;
      return {own, own, 0, length(), 0, 1};
    }
    const int shared = p_.active_ctas > 1 ? int(min(wide(ctas), quotient(rest, least))) : 0;
    const wide end = shared > 0 ? length() - rest : length();
    const int own = max(1, int(min(wide(ctas), quotient(end, least))));
    return {own, own, 0, end, shared, 1};
  }

  // Least length of equal slices; only a single slice may be shorter.
  WL_FN wide least_slice() const { return 2 * z_.per_tile * z_.grain; }

  // Lists of whole items, if there are enough items for each CTA to have a list; see `rounds_of` in
  // scheduler/partition/role_lists.py.
  struct Rounds {
    int each, lists;  // items per list, and lists
    bool are_all;     // there are rounds, and the last one was not left out
  };
  WL_FN Rounds rounds_of(int ctas) const {
    const int most = items() - max((items() - 1) / kPerSharedPrefill + 1, (p_.active_ctas + 1) / 2);
    if (most < ctas) return {0, 0, false};
    const int each = (most - 1) / (ctas + (kRounds - 1) * p_.active_ctas) + 1;
    const int lists = most / each;
    const wide in_rounds = (wide(lists - 1) / ctas + 1) * ctas * each;
    const bool are_all = in_rounds <= items();
    return {each, are_all ? lists : lists / ctas * ctas, are_all};
  }

  WL_FN void mark_slices(const Cuts& cuts) {
    const int all = cuts.slices + cuts.per_length * cuts.lengths;
    const wide rest = length() - cuts.end, parts = cuts.per_length * shortest_in(cuts.lengths);
    const wide snap = quotient(cuts.end, wide(cuts.slices) * kSnap);
    const int whole = cuts.each > 0 ? cuts.slices : 0;
    team_.each(team_.range(whole), [&](int i) { s_.marks[i] = {i * cuts.each, 0}; });
    int near = -1;
    team_.each(team_.range(all + 1 - whole), [&](int behind) {
      const int i = whole + behind, further = i - cuts.slices;
      if (i == all) return void(s_.marks[i] = {items(), 0});
      const wide at = further < 0 ? quotient(i * cuts.end, wide(cuts.slices))
                                  : cuts.end + quotient(parts_before(further, cuts) * rest, parts);
      s_.marks[i] = boundary(at, snap, near);
    });
    slices_ = {cuts.own, all - cuts.own};  // set last, for the loops above take all registers
    team_.sync();
  }

  // Length of the slices behind `end` before their slice `number`, in units of the shortest.
  WL_FN static wide parts_before(int number, const Cuts& cuts) {
    const int length = number / cuts.per_length, within = number - length * cuts.per_length;
    const wide longest = wide(1) << cuts.lengths, here = longest >> length;
    return cuts.per_length * (longest - here) + within * (here >> 1);
  }

  WL_FN int fitting_slices(int slices) const {
    if (items() <= slices) return slices / items() * items();
    const int each = (items() - 1) / slices + 1;
    return each <= kFew ? items() / each : slices;
  }

  WL_FN wide position(Mark mark) const {
    if (mark.item == items()) return length();
    const int head = head_of_item_.of(mark.item);
    const wide begin = head * head_length_ + s_.begin[mark.item - head * tiles_];
    return begin + (mark.visible > 0 ? cost_of_chunk(z_, mark.visible) : 0);
  }

  // Writes the boundaries of all options: two at ends of items, two that may cut items; of each
  // pair the first is for the fitting slices, the second for all slices that get work.
  WL_FN void mark(int slices) {
    int near = -1;  // last item found on the line of one head; an option's boundaries ascend
    int last_option = -1;
    wide snap = 0;
    team_.each(team_.range(kOptions * (slices + 1)), [&](int at) {
      const int option = at / (slices + 1), i = at % (slices + 1);
      const int working = option % 2 == 0 ? fitting_ : working_;
      if (option != last_option) {
        last_option = option;
        snap = option >= 2 ? length() / (wide(working) * kSnap) : length();
        near = -1;
      }
      s_.marks[at] = i < working ? boundary(quotient(i * length(), wide(working)), snap, near)
                                 : Mark{items(), 0};
    });
  }

  WL_FN Mark boundary(wide at, wide snap, int& near) const {
    const int head = head_at_.of(at);
    const wide rest = at - head * head_length_;
    if (near < 0 || rest < s_.begin[near]) {
      near = last_not_above(tiles_, rest, [this](int t) { return s_.begin[t]; });
    }
    while (near + 1 < tiles_ && s_.begin[near + 1] <= rest) ++near;
    const int visible = s_.visible[s_.order[near]];
    return move(head * tiles_ + near, visible, rest - s_.begin[near], snap);
  }

  // Moves a boundary to the nearest end of its item, if that is within `snap`, and else to a whole
  // key tile. No piece becomes shorter than a grain.
  WL_FN Mark move(int item, int visible, wide into, wide snap) const {
    const int grain = z_.grain;
    const wide cost = cost_of_chunk(z_, visible);
    const Mark nearest{item + (2 * into >= cost), 0};
    if (min(into, cost - into) <= snap || visible < 2 * grain) return nearest;
    const int done =
        int(quotient(2 * max(into - z_.fixed, wide(0)) + z_.per_tile, wide(2 * z_.per_tile)));
    if (2 * done < grain) return {item, 0};
    if (2 * (visible - done) < grain) return {item + 1, 0};
    return {item, min(max(done, grain), visible - grain)};
  }

  // Cost of the slice between two boundaries, including its partial results.
  WL_FN wide load(const Mark* marks) const {
    const Mark first = marks[0], last = marks[1];
    if (first.item == items()) return 0;
    const bool is_cut = first.visible > 0, ends_cut = last.visible > 0;
    const bool is_same = is_cut && first.item == last.item;
    return position(last) - position(first) + is_cut * z_.fixed +
           (int(is_cut) + ends_cut - is_same) * z_.partial;
  }

  const Params& p_;
  const RoleShape& z_;
  Team& team_;
  Scratch& s_;
  int tiles_, heads_;
  int working_ = 0, fitting_ = 0;  // most slices with work; of them, for an even split
  OwnAndShared slices_ = {0, 0};
  bool is_by_tile_ = false;
  wide head_length_ = 0;
  mutable Steps<int> head_of_item_;
  mutable Steps<wide> head_at_{0};  // head at a place of the line
  const Mark* boundaries_;
};

}  // namespace warploom
