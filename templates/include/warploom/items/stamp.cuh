// When each work item ran, in kernels that are made to tell it (WARPLOOM_TRACE): their Params have
// a place for it (codegen/abi.py).
#pragma once

#include <warploom/device/ptx.cuh>

namespace warploom {

// Lives as long as its CTA works on an item. Other kernels have none of it.
template <class K, class = void>
class Stamp {
 public:
  WL_FN Stamp(const typename K::Params& /*p*/, int /*index*/) {}
};

// The first thread writes, which always computes. What it has found at the beginning waits in
// memory, not in registers, which the accumulators need.
template <class K>
class Stamp<K, decltype(void(&K::Params::stamps))> {
 public:
  WL_FN Stamp(const typename K::Params& p, int index) : p_(p), index_(index) {
    if (threadIdx.x > 0) return;
    auto& stamp = p.stamps[index];
    stamp.cta = blockIdx.x;
    stamp.sm = sm_number();
    stamp.begin_cycle = clock64();
    stamp.begin = global_nanoseconds();
  }
  WL_FN ~Stamp() {
    if (threadIdx.x > 0) return;
    auto& stamp = p_.stamps[index_];
    stamp.end_cycle = clock64();
    stamp.end = global_nanoseconds();
  }
  Stamp(const Stamp&) = delete;
  Stamp& operator=(const Stamp&) = delete;

 private:
  const typename K::Params& p_;
  const int index_;
};

}  // namespace warploom
