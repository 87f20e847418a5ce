// Values of keys that do not exist, as tensor copies leave them.
#pragma once

#include <warploom/items/walk.cuh>
#include <warploom/staging/tile.cuh>

namespace warploom::hopper {

// A tensor copy brings whatever lies behind the last key, and 0 * NaN is not 0.
template <class K>
WL_FN bool leaves_garbage(const Columns<K>& columns, const Visit& visit) {
  using C = typename K::Config;
  return C::kBulk && !visit.is_full() && (C::kColumnPositions || columns.count < C::kKeys);
}

// Zeroes such values of a staged tile; kThreads threads share the work.
template <int kThreads, class K, class Half>
WL_FN void clear_absent(const Columns<K>& columns, Half* values) {
  using S = Sizes<K>;
  constexpr int kVectors = S::kDimV / kVector;
  for (int i = threadIdx.x % kThreads; i < S::kStagingKeys * kVectors; i += kThreads) {
    const int key = i / kVectors, lane = i % kVectors * kVector;
    if (columns.exists(key)) continue;
    *reinterpret_cast<uint4*>(values + ValueTile<K>::offset(key, lane)) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace warploom::hopper
