// Stands in for the device's header of that name: writes down what is asked for.
#pragma once

#include <warploom/device/qualifiers.cuh>

namespace warploom {

#ifdef WL_BULK_PREFETCH
constexpr bool kBulkPrefetch = true;
#else
constexpr bool kBulkPrefetch = false;
#endif

struct Asked {
  unsigned long long address;
  long long bytes;
};
inline Asked asked[1 << 16];
inline long long num_asked = 0;

template <bool kKeep>
void prefetch_bulk(unsigned long long address, int bytes) {
  asked[num_asked++] = {address, bytes};
}

template <bool kKeep>
void prefetch_sector(unsigned long long address) {
  asked[num_asked++] = {address, 32};
}

}  // namespace warploom
