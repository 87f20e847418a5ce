// How warps tell each other in shared memory, and the barriers there are.
#pragma once

#include <warploom/device/named_barriers.cuh>
#include <warploom/device/ptx.cuh>
#include <warploom/device/warp.cuh>
#include <warploom/hopper/ptx.cuh>

namespace warploom::hopper {

// How many arrivals kThreads threads make when they are done with something. Each warp arrives for
// itself, so that nothing moves on while one of its threads still reads or waits, whatever the
// other warps do. compute-sanitizer's racecheck counts only the threads that arrive themselves, so
// it gets kernels of its own, in which all do.
#ifdef WARPLOOM_RACECHECK
template <int kThreads>
constexpr int kTellers = kThreads;

WL_FN void barrier_tell(Barrier* barrier) { barrier_arrive(barrier); }
#else
template <int kThreads>
constexpr int kTellers = kThreads / kWarpSize;

// By the first thread, whose number is read anew: kept, it would cost a register, and an election
// (elect.sync) costs norms with RoPE 3 % of their time.
WL_FN void barrier_tell(Barrier* barrier) {
  __syncwarp();
  if (cta_thread() % kWarpSize == 0) barrier_arrive(barrier);
}
#endif

// What ordinary instructions wrote to shared memory, the tensor cores may read when all have told.
WL_FN void barrier_publish(Barrier* barrier) {
  fence_async_proxy();
  barrier_tell(barrier);
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
