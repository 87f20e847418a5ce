// Prefill and decode in one launch (POD-Attention): each CTA streams its list of decode items with
// a tile of few rows, then computes its list of prefill items, then those that it claims.
#pragma once

#include <warploom/lists.cuh>
#include <warploom/portable.cuh>

namespace warploom {

constexpr int kRoleBarrier = 11;  // all threads of a decode tile

// The arena of a decode tile whose threads are not all threads of the CTA. Beside it others compute
// with keys that should stay in L2, while what decodes read passes through: requests that share
// keys are told so by their format.
template <class K>
struct DecodeArena : Arena<K> {
  static constexpr bool kReadsOnce = true;
  WL_FN static void sync_all() { named_sync(kRoleBarrier, K::kTileThreads); }
};

template <class Prefill, class Decode>
WL_FN void run_portable_roles(const typename Prefill::Params& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  static_assert(Decode::kTileThreads == Sizes<Decode>::kThreads + kWarpSize &&
                    Decode::kTileThreads <= Sizes<Prefill>::kThreads,
                "a decode tile is streamed by the first threads of the CTA");
  await_earlier_kernels();
  if (threadIdx.x < Decode::kTileThreads) {
    stream_list<Decode>(p, shared_memory, gridDim.x + blockIdx.x);
  }
  __syncthreads();
  run_tall_list<Prefill>(p, shared_memory, blockIdx.x);
  // Read anew each time: registers are for tiles.
  volatile auto& header = header_of<Prefill>(p);
  if (header.num_shared == 0 || blockIdx.x >= header.num_active) return;
  volatile auto& claimed = *reinterpret_cast<unsigned*>(shared_memory + Prefill::kDrawnAt);
#pragma unroll 1
  while (true) {
    if (threadIdx.x == 0) claimed = claim_list(header);
    __syncthreads();
    const unsigned number = claimed;
    if (number >= header.num_shared) return;
    __syncthreads();  // all have read it
    run_tall_list<Prefill>(p, shared_memory, 2 * gridDim.x + number);
  }
}

}  // namespace warploom
