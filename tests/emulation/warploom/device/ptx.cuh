// Stands in for the device's header of that name. Copies are made at once.
#pragma once

#include <chrono>

#include <cute/arch/copy_sm80.hpp>

#include <warploom/variant.cuh>

namespace warploom {

template <bool kOnce = false, class Element>
void copy_vector(const Element* from, Element* to, bool exists) {
  static const uint4 zeros{};
  std::memcpy(to, exists ? static_cast<const void*>(from) : &zeros, sizeof(zeros));
}

inline void prefetch(const void* /*address*/) {}

template <class Element>
unsigned pack(Element, float low, float high) {
  return from_float<Element>(low).bits | unsigned(from_float<Element>(high).bits) << 16;
}

inline unsigned transpose(unsigned pair) {
  const unsigned lane = fibers::running % 32, first = fibers::running / 32 * 32;
  fibers::cta->values[fibers::running] = pair;
  fibers::wait_for_warp();
  unsigned transposed = 0;
  for (unsigned i = 0; i < 2; ++i) {  // row 2 * (lane % 4) + i, column lane / 4
    const unsigned from = first + (lane % 4 * 2 + i) * 4 + lane / 8;
    const unsigned half = unsigned(fibers::cta->values[from]) >> lane / 4 % 2 * 16 & 0xffffu;
    transposed |= half << 16 * i;
  }
  fibers::wait_for_warp();
  return transposed;
}

inline unsigned cta_thread() { return threadIdx.x; }

inline long long global_nanoseconds() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

inline unsigned sm_number() { return blockIdx.x / 2; }  // two CTAs fit

inline void named_sync(int id, int threads) { fibers::wait(fibers::cta->named[id], threads); }
inline void named_meet(int id, int threads) { named_sync(id, threads); }
inline void named_arrive(int id, int threads) { fibers::arrive(fibers::cta->named[id], threads); }

inline unsigned count_release_acquire(unsigned* counter) { return (*counter)++; }

inline unsigned load_acquire(const unsigned* address) { return *address; }

}  // namespace warploom
