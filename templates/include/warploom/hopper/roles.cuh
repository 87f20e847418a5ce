// Prefill and decode in one launch (POD-Attention): each CTA streams its list of decode items with a
// tile of few rows, and then does what there is of prefill as any Hopper kernel. The plan mostly
// gives a CTA one of the two, so that some SMs read memory while others compute.
#pragma once

#include <warploom/hopper/kernel.cuh>
#include <warploom/portable.cuh>

namespace warploom::hopper {

// The arena of a decode tile whose threads are not all threads of the CTA.
template <class K>
struct DecodeArena : Arena<K> {
  WL_FN static void sync_all() { named_sync(kRoleBarrier, K::kTileThreads); }
};

template <class Prefill, class Decode>
WL_FN void run_role_kernel(const typename Prefill::Params& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  static_assert(Decode::kTileThreads == Sizes<Decode>::kThreads + kWarpSize &&
                    Decode::kTileThreads <= Prefill::kCtaThreads,
                "a decode tile is streamed by the first threads of the CTA");
  await_earlier_kernels();
  if (threadIdx.x < Decode::kTileThreads) {
    stream_list<Decode>(p, shared_memory, gridDim.x + blockIdx.x);
  }
  fence_async_proxy();  // tensor copies write where decode tiles were
  __syncthreads();
  run_groups(p, Shared<Prefill>{shared_memory}, [] {});
}

}  // namespace warploom::hopper
