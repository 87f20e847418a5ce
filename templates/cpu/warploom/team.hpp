// A team of one: how a host thread runs the planner.
#pragma once

#include <warploom/variant.hpp>

#include <cstring>

namespace warploom {

struct Solo {
  static constexpr bool kIsMeasured = true;  // measure() has looked at the pages

  WL_FN Range range(int count) const { return {0, count}; }  // the part of this thread
  WL_FN Range part(int count) const { return {0, count}; }   // the same among all teams
  WL_FN bool is_first() const { return true; }
  WL_FN bool is_first_of_all() const { return true; }
  WL_FN void sync() const {}
  WL_FN wide max(wide value) const { return value; }
  // The sum of the threads before, and of all.
  WL_FN wide before(wide value, wide& total) const {
    total = value;
    return 0;
  }

  // Sorts by the upper halves, of which equal ones keep their order; there is room for as many more
  // behind. Byte by byte, leaving out bytes that are all the same.
  inline const wide* sort(wide* from, int count) const {
    wide* to = from + count;
    unsigned differ = 0;
    bool is_sorted = true;
    for (int i = 1; i < count; ++i) {
      differ |= unsigned((from[i] ^ from[0]) >> 32);
      is_sorted &= from[i - 1] <= from[i];
    }
    for (int shift = 32; shift < 64 && !is_sorted; shift += 8) {
      if ((differ >> (shift - 32) & 255) == 0) continue;
      int place[257] = {};
      for (int i = 0; i < count; ++i) ++place[(from[i] >> shift & 255) + 1];
      for (int digit = 0; digit < 255; ++digit) place[digit + 1] += place[digit];
      for (int i = 0; i < count; ++i) to[place[from[i] >> shift & 255]++] = from[i];
      wide* const done = from;
      from = to;
      to = done;
    }
    return from;
  }
};

}  // namespace warploom
