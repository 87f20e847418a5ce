// A team of one: how a host thread runs the planner.
#pragma once

#include <warploom/variant.hpp>

#include <cstddef>
#include <cstring>

namespace warploom {

struct Solo {
  static constexpr bool kIsHost = true;   // measure() has checked the batch
  static constexpr int kMostGroups = 32;  // of `max_of_each`

  WL_FN Range range(int count) const { return {0, count}; }  // the part of this thread
  template <class Step>
  WL_FN static void each(Range range, const Step& step) {
    for (int i = range.begin; i < range.end; ++i) step(i);
  }
  // The same among all teams.
  template <class Step>
  WL_FN static void each_of_all(int count, const Step& step) {
    for (int i = 0; i < count; ++i) step(i);
  }
  // Calls step(i, lines) for all i < count, with some of the lines in each call.
  template <class Step>
  WL_FN static void each_line(int count, int lines, const Step& step, int = 0) {
    for (int i = 0; i < count; ++i) step(i, Range{0, lines});
  }
  WL_FN bool is_first() const { return true; }
  WL_FN bool is_first_team() const { return true; }
  WL_FN void sync() const {}
  WL_FN bool any(bool value) const { return value; }
  // The sum of the threads before, and of all.
  WL_FN wide before(wide value, wide& total) const {
    total = value;
    return 0;
  }
  // The greatest value(group, 0 .. count - 1) of each group, or 0.
  template <class Value>
  WL_FN const wide* max_of_each(int groups, int count, const Value& value) {
    for (int group = 0; group < groups; ++group) {
      most_[group] = 0;
      for (int i = 0; i < count; ++i) most_[group] = max(most_[group], value(group, i));
    }
    return most_;
  }
  // measure() has looked for negative numbers.
  WL_FN static bool copy(const int* from, int* to, int count) {
    std::memcpy(to, from, count * sizeof(int));
    return false;
  }
  // Copies work items for other heads. As numbers, which fill vectors wherever an item begins.
  template <class Item>
  WL_FN static void copy_items(const Item* from, Item* to, int count, int heads) {
    constexpr int kSize = sizeof(Item) / sizeof(int), kHead = offsetof(Item, kv_head) / sizeof(int);
    const int* const source = reinterpret_cast<const int*>(from);
    int* const target = reinterpret_cast<int*>(to);
    for (int i = 0; i < count * kSize; ++i) {
      target[i] = source[i] + (i % kSize == kHead ? heads : 0);
    }
  }
  WL_FN void vote(bool) const {}
  WL_FN bool is_last(bool& is_objected) const {
    is_objected = false;
    return true;
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

 private:
  wide most_[kMostGroups];
};

}  // namespace warploom
