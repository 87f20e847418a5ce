// The online softmax of a row of which each lane of a warp has a logit; see softmax.cuh for rows in
// accumulators.
#pragma once

#include <warploom/compute/softmax.cuh>

namespace warploom {

template <class K>
struct RowSoftmax {
  float factor;  // of logits, to base 2
  float largest = -kInfinity, sum = 0.0f;

  // True if the reference moved: the output must then be scaled by `rescale`.
  WL_FN bool follow(float logit, float& rescale) {
    if (!__any_sync(kAllLanes, outgrows<K>(logit, largest, factor))) return false;
    float found = logit;
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      found = ::fmaxf(found, __shfl_xor_sync(kAllLanes, found, distance));
    }
    rescale = exp2((largest - found) * factor);
    largest = found;
    sum *= rescale;
    return true;
  }
  WL_FN float probability(float logit) {
    // Differences first: of large logits, products are rounded by hundreds. None of infinity, which
    // weighs infinity.
    const float reference = abs(largest) < kInfinity ? largest : 0.0f;
    const float p = exp2((logit - reference) * factor);
    sum += p;
    return p;
  }
  // Completes the sum; kOwners neighbours have the same logits.
  template <int kOwners>
  WL_FN void finish() {
#pragma unroll
    for (int distance = kWarpSize / 2; distance >= kOwners; distance /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
  }
};

}  // namespace warploom
