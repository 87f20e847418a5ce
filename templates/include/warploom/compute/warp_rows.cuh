// Stored rows in the registers of a warp, without staging, and sums over the lanes that share a
// row.
#pragma once

#include <warploom/staging/tile.cuh>

namespace warploom {

// How a warp holds kKeys stored rows: a load is several of them, each over kLanes neighbours.
template <class Element, int kHeadDim, int kKeys>
struct WarpRows {
  static constexpr int kNumbers = 16 / int(sizeof(Element));  // of a lane
  static constexpr int kLanes = kHeadDim > kNumbers ? power_of_two_from(kHeadDim / kNumbers) : 2;
  static constexpr int kAtOnce = kWarpSize / kLanes;
  static constexpr int kLoads = kKeys / kAtOnce;
  static constexpr int kOwners = kWarpSize / kKeys;  // lanes that own a key
  static_assert(kLoads >= 1 && kOwners >= 1, "a load is a whole one, and each key has an owner");

  WL_FN static int column() { return threadIdx.x % kLanes * kNumbers; }
  WL_FN static bool in_row() { return kLanes * kNumbers == kHeadDim || column() < kHeadDim; }
  WL_FN static int bytes() { return threadIdx.x % kLanes * 16; }  // before the lane's column
  // The key of which this lane has a part in a load.
  WL_FN static int key(int load) { return load * kAtOnce + threadIdx.x % kWarpSize / kLanes; }

  // Sums over the lanes of a row; parts[i] is of load i. Each step halves the lanes that share a
  // sum and the sums that a lane goes on with. What is left is the sum of this lane's own key.
  WL_FN static float sum(float (&parts)[kLoads]) {
#pragma unroll
    for (int halves = 2; halves <= kLoads; halves *= 2) {
      const int distance = kLanes / halves, count = kLoads / halves;
      const bool upper = threadIdx.x & distance;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float kept = upper ? parts[i + count] : parts[i];
        const float given = upper ? parts[i] : parts[i + count];
        parts[i] = kept + __shfl_xor_sync(kAllLanes, given, distance);
      }
    }
#pragma unroll
    for (int left = kOwners / 2; left > 0; left /= 2) {
      parts[0] += __shfl_xor_sync(kAllLanes, parts[0], left);
    }
    return parts[0];
  }
  WL_FN static int own_key() {
    const unsigned lane = threadIdx.x % kWarpSize;
    return lane % kLanes / kOwners * kAtOnce + lane / kLanes;
  }
  WL_FN static int owner(int key) { return key % kAtOnce * kLanes + key / kAtOnce * kOwners; }
};

}  // namespace warploom
