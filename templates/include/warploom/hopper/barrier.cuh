// How warps signal each other by barriers in shared memory, and rings of buffers.
#pragma once

#include <warploom/device/named_barriers.cuh>
#include <warploom/device/ptx.cuh>
#include <warploom/device/warp.cuh>
#include <warploom/hopper/ptx.cuh>

namespace warploom::hopper {

// How many arrivals kThreads threads make when they are done with something. Each warp arrives for
// itself once all its threads are done, so no barrier completes while one of them still reads or
// waits, whatever the other warps do. compute-sanitizer's racecheck credits only the threads that
// arrive themselves, so it gets kernels of its own, in which all threads arrive.
#ifdef WARPLOOM_RACECHECK
template <int kThreads>
constexpr int kArrivals = kThreads;

WL_FN void barrier_arrive_warp(Barrier* barrier) { barrier_arrive(barrier); }
#else
template <int kThreads>
constexpr int kArrivals = kThreads / kWarpSize;

// The warp's first thread arrives. Its number is read anew: kept, it would cost a register, and an
// election (elect.sync) costs norms with RoPE 3 % of their time.
WL_FN void barrier_arrive_warp(Barrier* barrier) {
  __syncwarp();
  if (cta_thread() % kWarpSize == 0) barrier_arrive(barrier);
}
#endif

// As barrier_arrive_warp, after ordinary writes to shared memory: once all have arrived, the tensor
// cores may read what was written.
WL_FN void barrier_publish(Barrier* barrier) {
  fence_async_proxy();
  barrier_arrive_warp(barrier);
}

// Position in a ring of kStages buffers; the phase flips each time round.
template <int kStages>
struct Ring {
  int stage = 0;
  int phase = 0;
  WL_FN void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace warploom::hopper
