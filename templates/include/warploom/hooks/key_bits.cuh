// A bit for each key of a thread: what a row sees of them by a mask of bounds, each of which holds
// for a run of keys.
#pragma once

#include <warploom/compute/fragments.cuh>
#include <warploom/items/walk.cuh>

namespace warploom {

// Listed columns lie anywhere in the sequence, so that its runs are not runs of a tile; and of
// tiles with more than 128 keys a thread has more than a word has bits.
template <class K>
constexpr bool kHasKeyBits =
    K::Variant::kMaskIsOfBounds && !K::Config::kColumnPositions && Fragments<K>::kThreadKeys <= 32;

template <class K>
class KeyBits {
  using F = Fragments<K>;

 public:
  using Bits = unsigned;

  // Where this thread's first key is in the tile.
  WL_FN KeyBits(const Columns<K>& columns, int first_key)
      : begin_(columns.kv_pos(first_key)), count_(columns.count - first_key) {}

  // Limits are within 2^31 - 2^29 (`_LIMIT` in key_bits.py), positions below 2^28 and a tile: their
  // differences are ints. Keys that exist, up to a position, from one on, or if a condition of the
  // row holds.
  WL_FN Bits upto(int kv_pos) const {
    return lowest(F::keys_before(min(kv_pos - begin_ + 1, count_)));
  }
  WL_FN Bits from(int kv_pos) const { return all() & ~lowest(F::keys_before(kv_pos - begin_)); }
  WL_FN Bits all_if(bool condition) const { return condition ? all() : Bits(0); }

  WL_FN static bool has(Bits bits, int c) { return (bits >> c & 1) != 0; }

 private:
  WL_FN Bits all() const { return lowest(F::keys_before(count_)); }
  // So many bits from the lowest on, all 32 if it is as many.
  WL_FN static Bits lowest(int count) { return ~Bits(~0ull << count); }

  int begin_, count_;  // its position, and how many keys exist from it on
};

}  // namespace warploom
