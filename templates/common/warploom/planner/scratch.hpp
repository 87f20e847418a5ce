// Scratch memory of the planner; runtime/strategies/scratch.py computes its size.
#pragma once

#include <warploom/planner/memory.hpp>
#include <warploom/planner/shape.hpp>

namespace warploom {

// A boundary between two slices of a line: an item, and its visible key tiles that come before.
struct Mark {
  int item, visible;
};

// Numbers of cuts and of split items up to a boundary.
struct CutCount {
  int cuts, opens;
};

struct Scratch {
  wide* begin;       // [tiles + 1, the last unused] where the items of a line begin
  wide* sort;        // [2 * tiles that are sorted]
  Mark* marks;       // [max_marks]; with options [kOptions][slices + 1]
  CutCount* counts;  // [slices + 1]
  Range* keys;       // [tiles] visible keys
  int* visible;      // [tiles] visible key tiles
  int* segment;      // [tiles]
  int* order;        // [tiles] tile at each place of a line
  int* first_tile;   // [segments + 1]
  int* cut_key;      // [slices + 1] key at which a boundary cuts its item
  char* end;         // where another Scratch may begin

  WL_FN Scratch(const RoleShape& z, char* memory) {
    Memory free(memory);
    free.take(begin, z.max_tiles + 1);
    free.take(sort, 2 * min(z.max_tiles, z.max_requests));
    free.take(marks, z.max_marks);
    free.take(counts, z.max_slices + 1);
    free.take(keys, z.max_tiles);
    free.take(visible, z.max_tiles);
    free.take(segment, z.max_tiles);
    free.take(order, z.max_tiles);
    free.take(first_tile, z.max_requests + 1);
    free.take(cut_key, z.max_slices + 1);
    end = free.end();
  }
};

// Quotients by one divisor. Division is slow, and successive values mostly have the same quotient.
template <class Number>
class Steps {
 public:
  WL_FN explicit Steps(Number size) : size_(size) {}

  // `value` is not negative.
  WL_FN int of(Number value) {
    if (value < begin_ || value - begin_ >= size_) {
      found_ = int(quotient(value, size_));
      begin_ = found_ * size_;
    }
    return found_;
  }

 private:
  Number size_, begin_ = 0;
  int found_ = 0;
};

// Index of the last of `count` ascending values that is not above `wanted`; value(0) is not.
template <class Value, class Wanted>
WL_FN int last_not_above(int count, Wanted wanted, const Value& value) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (value(middle) <= wanted) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace warploom
