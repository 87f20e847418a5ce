// The items of a line, and where to cut it: scheduler/even.py, for a team of threads or for one.
#pragma once

namespace warploom {

template <class K, class Team>
class Line {
  using Params = typename K::Params;

 public:
  WL_FN Line(const Params& p, Team& team, Scratch& scratch, int tiles)
      : p_(p), team_(team), s_(scratch), tiles_(tiles) {}

  WL_FN int items() const { return tiles_ * p_.heads_per_line; }

  // Lays the tiles on the line: the longest, the shortest, the second longest, ..., unless
  // segments have several.
  WL_FN void lay(bool as_they_are) {
    const Range mine = team_.range(tiles_);
    if (as_they_are) {
      for (int t = mine.begin; t < mine.end; ++t) s_.order[t] = t;
    } else {
      for (int t = mine.begin; t < mine.end; ++t) {
        s_.sort[t] = wide(0x7fffffff - s_.visible[t]) << 32 | t;
      }
      const wide* falling = team_.sort(s_.sort, tiles_);
      for (int t = mine.begin; t < mine.end; ++t) {
        s_.order[t] = int(falling[t % 2 == 0 ? t / 2 : tiles_ - 1 - t / 2]);
      }
    }
    team_.sync();
    wide cost = 0, total = 0;
    for (int t = mine.begin; t < mine.end; ++t) cost += cost_of(s_.visible[s_.order[t]]);
    wide begin = team_.before(cost, total);
    for (int t = mine.begin; t < mine.end; ++t) {
      s_.begin[t] = begin;
      begin += cost_of(s_.visible[s_.order[t]]);
    }
    head_length_ = total;
    length_ = total * p_.heads_per_line;
    team_.sync();
  }

  // Leaves the boundaries with the least longest CTA in `best()`.
  WL_FN void choose() {
    const int columns = max(1, int(min(wide(p_.columns), length_ / (2 * p_.per_tile * p_.grain))));
    const int fitting = fitting_columns(columns);
    for (int option = 0; option < kOptions; ++option) {
      mark(option, option % 2 == 0 ? fitting : columns, option >= 2);
    }
    team_.sync();
    wide least = 0;
    for (int option = 0; option < kOptions; ++option) {
      const wide load = longest(s_.marks + option * (p_.columns + 1));
      if (option == 0 || load < least) {
        least = load;
        best_ = s_.marks + option * (p_.columns + 1);
      }
    }
  }

  // Boundaries 0 .. p.columns; those behind the last CTA with work are the end of the line.
  WL_FN const Mark* best() const { return best_; }

 private:
  WL_FN wide cost_of(int visible) const { return p_.fixed + wide(p_.per_tile) * visible; }

  WL_FN int fitting_columns(int columns) const {
    if (items() <= columns) return columns / items() * items();
    const int each = (items() - 1) / columns + 1;
    return each <= p_.few ? items() / each : columns;
  }

  WL_FN int tile_at(int item) const { return s_.order[item % tiles_]; }

  WL_FN wide place(Mark mark) const {
    const wide begin = mark.item / tiles_ * head_length_ +
                       (mark.item % tiles_ == 0 ? 0 : s_.begin[mark.item % tiles_]);
    return begin + (mark.visible > 0 ? cost_of(mark.visible) : 0);
  }

  WL_FN void mark(int option, int columns, bool may_cut) {
    Mark* marks = s_.marks + option * (p_.columns + 1);
    const Range mine = team_.range(p_.columns + 1);
    const wide snap = length_ / (wide(columns) * p_.snap);
    int near = -1;  // place on the line of one head; boundaries ascend
    for (int i = mine.begin; i < mine.end; ++i) {
      if (i >= columns) {
        marks[i] = {items(), 0};
        continue;
      }
      const wide at = i * length_ / columns;
      const int head = p_.heads_per_line == 1 ? 0 : int(at / head_length_);
      const wide rest = at - head * head_length_;
      if (near < 0 || rest < s_.begin[near]) {
        near = last_not_above(tiles_, rest, [this](int t) { return s_.begin[t]; });
      }
      while (near + 1 < tiles_ && s_.begin[near + 1] <= rest) ++near;
      marks[i] = move(head * tiles_ + near, rest - s_.begin[near], snap, may_cut);
    }
  }

  // Moves a boundary to the nearest end of its item; or only if that is near, and else to a whole
  // key tile. No piece becomes shorter than a grain.
  WL_FN Mark move(int item, wide into, wide snap, bool may_cut) const {
    const int visible = s_.visible[tile_at(item)], grain = p_.grain;
    const wide cost = cost_of(visible);
    const Mark nearest{item + (2 * into >= cost), 0};
    if (!may_cut || min(into, cost - into) <= snap || visible < 2 * grain) return nearest;
    const int done = int((2 * max(into - p_.fixed, wide(0)) + p_.per_tile) / (2 * p_.per_tile));
    if (2 * done < grain) return {item, 0};
    if (2 * (visible - done) < grain) return {item + 1, 0};
    return {item, min(max(done, grain), visible - grain)};
  }

  // Cost of the longest CTA, with what its partial results cost.
  WL_FN wide longest(const Mark* marks) {
    const Range mine = team_.range(p_.columns);
    wide found = 0;
    for (int i = mine.begin; i < mine.end; ++i) {
      const Mark first = marks[i], last = marks[i + 1];
      if (first.item == items()) break;
      const bool is_cut = first.visible > 0, ends_cut = last.visible > 0;
      const bool is_same = is_cut && first.item == last.item;
      const wide load = place(last) - place(first) + is_cut * p_.fixed +
                        (int(is_cut) + ends_cut - is_same) * p_.partial;
      found = max(found, load);
    }
    return team_.max(found);
  }

  const Params& p_;
  Team& team_;
  Scratch& s_;
  int tiles_;
  wide head_length_ = 0, length_ = 0;
  const Mark* best_ = nullptr;
};

}  // namespace warploom
