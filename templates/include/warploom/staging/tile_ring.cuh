// A ring of tiles of keys on their way: which they are, and which item is at hand. `Pipeline`,
// which copies them, derives from it and has group(), wait(), copy_ahead() and advance().
//
// Where warps stream keys, the ring goes on over the borders of items, and of lists: items are
// numbered from 0 on in the sequence in which the CTA computes them.
#pragma once

#include <warploom/items/walk.cuh>

namespace warploom {

template <class K, class Pipeline>
class TileRing {
  using S = Sizes<K>;
  using Element = typename K::Config::Element;
  using Unit = half_t;

 public:
  // Begins with the item of that number, whose facts are known.
  WL_FN TileRing(const Item<K>& item, int number)
      : walk_(item, Pipeline::group()),
        now_(number),
        found_(number),
        may_find_(number),
        stage_(0) {}

  // Takes up an item whose facts are known, and those of the next item of its list. The gaps in
  // front of its tiles are left out: they are from when nothing was known of the item.
  WL_FN void begin(int number, bool ends_list) {
    now_ = number;
    may_find_ = ends_list ? number : number + 1;
    while (ring_[0].is_of(number - 1)) {
      self().wait();
      self().copy_ahead();
      self().advance();
    }
  }
  // True while a tile of the item is next.
  WL_FN bool has_tile() const {
    return ring_[0].exists() && (!S::kSplitKeys || ring_[0].is_of(now_));
  }
  WL_FN const Visit& visit() const { return ring_[0]; }
  WL_FN Unit* keys() const { return ahead().arena.keys(stage_, Pipeline::group()); }
  WL_FN Unit* values() const { return ahead().arena.values(stage_, Pipeline::group()); }
  WL_FN Element* new_keys() const { return ahead().arena.new_keys(stage_, Pipeline::group()); }
  WL_FN Element* new_values() const { return ahead().arena.new_values(stage_, Pipeline::group()); }

 protected:
  static constexpr int kStages = K::Config::kStages;

  WL_FN const Item<K>& ahead() const { return walk_.item(); }

  // The next tile, of the item that was searched last or of the one after it.
  WL_FN Visit find() {
    Visit visit = walk_.next();
    if constexpr (S::kSplitKeys) {
      while (!visit.exists() && found_ < may_find_) {
        walk_.move_to(++found_, Pipeline::group());
        visit = walk_.next();
      }
      visit = visit.tagged(found_);
    }
    return visit;
  }
  // Stage of the tile that was used last, where the next one goes.
  WL_FN int stage_before() const { return stage_ == 0 ? kStages - 1 : stage_ - 1; }
  WL_FN void shift(const Visit& next) {
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) ring_[i] = ring_[i + 1];
    ring_[kStages - 1] = next;
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

  KeyWalk<K> walk_;      // of the item of the tile found last
  int now_, found_;      // numbers of the item at hand, and of that one
  int may_find_;         // number of the last item whose facts are known
  int stage_;            // of the tile whose turn it is
  Visit ring_[kStages];  // tiles from that one on

 private:
  WL_FN Pipeline& self() { return static_cast<Pipeline&>(*this); }
};

}  // namespace warploom
