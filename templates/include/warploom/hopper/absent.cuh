// Values of keys that do not exist, as tensor copies leave them.
#pragma once

#include <warploom/hopper/shared.cuh>

namespace warploom::hopper {

// A tensor copy brings whatever lies behind the last key, and 0 * NaN is not 0.
template <class K>
WL_FN bool leaves_garbage(const Columns<K>& columns, const Visit& visit) {
  using C = typename K::Config;
  return C::kBulk && !visit.is_full() && (C::kColumnPositions || columns.count < C::kKeys);
}

// Makes such values zeros, by 128 threads.
template <class K>
WL_FN void clear_absent(const Columns<K>& columns, typename K::Config::Element* values) {
  constexpr int kVectors = Sizes<K>::kDimV / kVector;
  for (int i = threadIdx.x % 128; i < K::Config::kKeys * kVectors; i += 128) {
    const int key = i / kVectors, lane = i % kVectors * kVector;
    if (columns.exists(key)) continue;
    *reinterpret_cast<uint4*>(values + ValueTile<K>::offset(key, lane)) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace warploom::hopper
