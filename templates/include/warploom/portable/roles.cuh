// Prefill and decode in one launch (POD-Attention). Each CTA streams its own decode list, and then
// shared decode lists that it claims, with a tile of few rows. Then it computes its own prefill
// list, and then shared prefill lists that it claims.
#pragma once

#include <warploom/items/lists.cuh>
#include <warploom/portable/kernel.cuh>

namespace warploom {

// The arena of a decode tile, whose threads are not all threads of the CTA. Keys of decodes are
// read once and pass through L2, in which the keys of prefills that run beside them should stay.
// Which keys requests share is known from their format.
template <class K>
struct DecodeArena : Arena<K> {
  static constexpr bool kReadsOnce = true;
  WL_FN static void sync_all() { named_meet(kRoleBarrier, K::kTileThreads); }
};

// Computes a CTA's decodes, by the threads of the decode tile: its own list, then shared lists
// until none is left. CTAs that do not decode do not even look for a list, since the whole CTA
// would wait for that load. Before the first item numbers of drawn lists go to two places in turn,
// so one barrier after each draw is enough.
template <class Decode>
WL_FN void stream_lists(const typename Decode::Params& p, char* shared_memory,
                        volatile ClaimState& claims) {
  if (!claims.has_decodes()) return;
  List list = list_of<Decode>(p, Decode::PlanHeader::kDecodeLists * gridDim.x + claims.cta());
  auto opening = load_first_opening<Decode>(p, list.number);
#pragma unroll 1
  for (int place = 0; list.is_empty(); place ^= 1) {
    if (threadIdx.x == 0) claims.template claim_decodes<Decode>(p, place);
    DecodeArena<Decode>::sync_all();
    if (claims.list(place) == kNoList) return;
    list = list_of<Decode>(p, claims.list(place));
    opening = load_first_opening<Decode>(p, list.number);
  }
  stream_items<Decode>(p, shared_memory, opening, list);
}

// Computes a CTA's prefills: its own list, then shared lists until none is left.
template <class Prefill>
WL_FN void run_tall_lists(const typename Prefill::Params& p, char* shared_memory,
                          volatile ClaimState& claims) {
  run_tall_list<Prefill>(p, shared_memory, claims.cta());
  if (!claims.claims_prefills()) return;
#pragma unroll 1
  while (true) {
    if (threadIdx.x == 0) claims.template claim_prefills<Prefill>(p, 0);
    __syncthreads();
    const unsigned list = claims.list(0);
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
  volatile auto& claims = claim_state_in<Prefill>(shared_memory);
  if (threadIdx.x == 0) {
    claims.read(header_of<Prefill>(p));
    claims.set_cta(blockIdx.x);
  }
  __syncthreads();
  if (threadIdx.x < Decode::kTileThreads) stream_lists<Decode>(p, shared_memory, claims);
  __syncthreads();
  run_tall_lists<Prefill>(p, shared_memory, claims);
  if constexpr (Prefill::Config::kComposed) {
    merge_composed_rows(Item<Prefill>{p, {shared_memory, 0}});
  }
}

}  // namespace warploom
