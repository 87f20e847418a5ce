// How the warps that issue copies walk over the keys of an item.
#pragma once

#include <warploom/items/walk.cuh>

namespace warploom::hopper {

// The same visits as KeyWalk's, for a whole warp. If classes of tiles depend on tensors, each lane
// classifies a different one of 32 tiles, so that the warp waits once for all their loads.
template <class K>
class WarpWalk {
  using C = typename K::Config;
  static constexpr int kStep = kWarpSize * C::kKeys;

 public:
  // Listed columns and composed tiles are classified by whole warps.
  static constexpr bool kByLanes =
      K::Variant::kClassesRead && !C::kColumnPositions && !C::kComposed;

  WL_FN explicit WarpWalk(const Item<K>& item) : walk_(item, 0) {
    const Range places = item.facts().places;
    begin_ = places.begin;
    left_ = places.end - places.begin;
  }

  WL_FN Visit next() {
    if constexpr (!kByLanes) return walk_.next();
    while (seen_ == 0) {
      if (left_ <= 0) return {Visit::kNone, TileClass::kPartial};
      const int own = threadIdx.x % kWarpSize * C::kKeys;
      class_ = own < left_ ? walk_.classify(begin_ + own) : TileClass::kSkip;
      seen_ = __ballot_sync(kAllLanes, class_ != TileClass::kSkip);
      first_ = begin_;
      if (left_ > kStep) begin_ += kStep;  // else it might overflow
      left_ -= kStep;
    }
    const int lane = __ffs(seen_) - 1;
    seen_ &= seen_ - 1;
    const int found = __shfl_sync(kAllLanes, static_cast<int>(class_), lane);
    return {first_ + lane * C::kKeys, static_cast<TileClass>(found)};
  }

 private:
  KeyWalk<K> walk_;
  int begin_, left_;      // of the places that no lane has classified
  int first_ = 0;         // place of the first lane's tile
  unsigned seen_ = 0;     // lanes whose tiles are to be visited
  TileClass class_ = {};  // of the lane's tile
};

}  // namespace warploom::hopper
