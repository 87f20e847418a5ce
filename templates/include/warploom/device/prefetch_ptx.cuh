// What only PTX says of prefetches. `tests/emulation` has a header of this name for the host.
#pragma once

#include <warploom/device/qualifiers.cuh>

namespace warploom {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kBulkPrefetch = true;
#else
constexpr bool kBulkPrefetch = false;
#endif

// Lets whole lines come to L2, by the engine that copies tensors: one instruction for up to 2 GiB.
// `kKeep`: they are the last to be evicted.
template <bool kKeep>
WL_FN void prefetch_bulk(unsigned long long address, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kKeep) {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(address),
                 "r"(bytes), "l"(policy));
  } else {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
  }
#endif
}

// Lets the sector of an address come to L2.
template <bool kKeep>
WL_FN void prefetch_sector(unsigned long long address) {
  if constexpr (kKeep) {
    asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(address));
  } else {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
  }
}

}  // namespace warploom
