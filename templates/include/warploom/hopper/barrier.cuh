// Shared-memory barriers (mbarrier) and named barriers, as thin wrappers over PTX.
#pragma once

#include <cute/arch/util.hpp>

#include <warploom/qualifiers.cuh>
#include <warploom/warp.cuh>

namespace warploom::hopper {

using Barrier = uint64_t;

WL_FN void barrier_init(Barrier* barrier, int arrivals) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(cute::cast_smem_ptr_to_uint(barrier)),
      "r"(arrivals));
}

WL_FN void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

WL_FN void barrier_arrive(Barrier* barrier) {
  asm volatile(
      "mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(cute::cast_smem_ptr_to_uint(barrier))
      : "memory");
}

// Arrivals of kThreads threads that have done with something. Each warp arrives for itself, so that
// nothing moves on while one of its threads still reads or waits, whatever the other warps do.
// compute-sanitizer's racecheck credits those threads alone that arrive, and so has kernels of its
// own.
#ifdef WARPLOOM_RACECHECK
template <int kThreads>
constexpr int kTellers = kThreads;

WL_FN void barrier_tell(Barrier* barrier) { barrier_arrive(barrier); }
#else
template <int kThreads>
constexpr int kTellers = kThreads / kWarpSize;

WL_FN void barrier_tell(Barrier* barrier) {
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) barrier_arrive(barrier);
}
#endif

WL_FN void barrier_arrive_expect(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   cute::cast_smem_ptr_to_uint(barrier)),
               "r"(bytes)
               : "memory");
}

WL_FN void barrier_wait(Barrier* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(cute::cast_smem_ptr_to_uint(barrier)),
      "r"(parity)
      : "memory");
}

// Orders generic-proxy writes to shared memory before later wgmma or TMA accesses by any thread
// that is synchronised with this one afterwards.
WL_FN void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

WL_FN void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

WL_FN void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kCount>
WL_FN void set_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
WL_FN void set_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Hardware barriers by number; 0 is __syncthreads.
constexpr int kConsumersBarrier = 1;  // all consumer threads
constexpr int kTurnBarrier = 2;       // + group: that group may issue its products
constexpr int kGroupBarrier = 5;      // + group: the 128 threads of a group
constexpr int kOpenersBarrier = 8;    // those of the producer group that open items
constexpr int kTransformBarrier = 9;  // the group that transforms staged tiles

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
