// Prefill and decode in one launch (POD-Attention): each CTA streams its list of decode items with
// a tile of few rows, then those that it claims; then it computes its list of prefill items, and
// then those that it claims.
#pragma once

#include <warploom/items/lists.cuh>
#include <warploom/portable/kernel.cuh>

namespace warploom {

// The arena of a decode tile whose threads are not all threads of the CTA. Beside it others compute
// with keys that should stay in L2, while what decodes read passes through: requests that share
// keys are told so by their format.
template <class K>
struct DecodeArena : Arena<K> {
  static constexpr bool kReadsOnce = true;
  WL_FN static void sync_all() { named_meet(kRoleBarrier, K::kTileThreads); }
};

// The decodes of a CTA, by the threads of the tile: its own list, and, if it is one of those that
// decode, shared ones until none is left. What is drawn has two places, by turns: so a barrier
// after each draw is enough, behind which all have left the list before, too. Others do not even
// look for a list: that is a load that all of the CTA would wait for.
template <class Decode>
WL_FN void stream_lists(const typename Decode::Params& p, char* shared_memory,
                        volatile Drawn& drawn) {
  if (!drawn.decodes()) return;
  unsigned list = kDecodeLists * gridDim.x + drawn.cta();
#pragma unroll 1
  for (int place = 0;; place ^= 1) {
    stream_list<Decode>(p, shared_memory, list);
    if (!drawn.claims_decodes()) return;
    if (threadIdx.x == 0) drawn.template claim_decodes<Decode>(p, place);
    DecodeArena<Decode>::sync_all();
    list = drawn.list(place);
    if (list == kNoList) return;
  }
}

// The prefills of a CTA: its own list, then shared ones until none is left.
template <class Prefill>
WL_FN void run_tall_lists(const typename Prefill::Params& p, char* shared_memory,
                          volatile Drawn& drawn) {
  run_tall_list<Prefill>(p, shared_memory, drawn.cta());
  if (!drawn.claims_prefills()) return;
#pragma unroll 1
  while (true) {
    if (threadIdx.x == 0) drawn.template claim_prefills<Prefill>(p, 0);
    __syncthreads();
    const unsigned list = drawn.list(0);
    if (list == kNoList) return;
    __syncthreads();  // all have read it
    run_tall_list<Prefill>(p, shared_memory, list);
  }
}

template <class Prefill, class Decode>
WL_FN void run_portable_roles(const typename Prefill::Params& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  static_assert(Decode::kTileThreads == Sizes<Decode>::kThreads + kWarpSize &&
                    Decode::kTileThreads <= Sizes<Prefill>::kThreads,
                "a decode tile is streamed by the first threads of the CTA");
  await_earlier_kernels();
  volatile auto& drawn = drawn_in<Prefill>(shared_memory);
  if (threadIdx.x == 0) {
    drawn.read(header_of<Prefill>(p));
    drawn.be(blockIdx.x);
  }
  __syncthreads();
  if (threadIdx.x < Decode::kTileThreads) stream_lists<Decode>(p, shared_memory, drawn);
  __syncthreads();
  run_tall_lists<Prefill>(p, shared_memory, drawn);
  if constexpr (Prefill::Config::kComposed) {
    merge_composed_rows(Item<Prefill>{p, {shared_memory, 0}});
  }
}

}  // namespace warploom
