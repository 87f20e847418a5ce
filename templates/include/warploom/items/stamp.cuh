// Records when each work item ran, in kernels that are built with WARPLOOM_TRACE: their Params have
// a member for it (codegen/abi.py).
#pragma once

#include <warploom/device/ptx.cuh>

namespace warploom {

// Lives as long as its CTA works on an item. In other kernels it does nothing.
template <class K, class = void>
class Stamp {
 public:
  WL_FN Stamp(const typename K::Params& /*p*/, int /*index*/) {}
};

// Thread 0 writes, since it always computes. The begin is written at once and not kept in
// registers, which the accumulators need.
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
