// Prefill and decode in one launch (POD-Attention). Each CTA first streams its list of decode
// items, and the shared decode lists that it claims, with a tile of few rows. Then it works through
// its prefill items as any Hopper kernel does. The plan mostly gives a CTA only one of the two, so
// that some SMs read memory while others compute.
#pragma once

#include <warploom/hopper/kernel.cuh>
#include <warploom/hopper/tensor_pipeline.cuh>
#include <warploom/portable/roles.cuh>

namespace warploom::hopper {

// The arena of a decode tile. If the decode tile can use the boxes of the prefill tile's tensor
// maps, tensor copies bring its keys.
template <class K, bool kHasBoxes = kInBoxes<typename K::Config>>
struct DecodeArena : warploom::DecodeArena<K> {};
template <class K>
struct DecodeArena<K, true> : warploom::DecodeArena<K> {
  using Pipeline = TensorPipeline<K>;
};

// Whether an SM should decode if share / 2^16 of the SMs do. These are spread evenly over groups
// (GPCs), whose SMs share a path to L2, which carries 600 GB/s on an H200: the reads of 12 SMs that
// decode. Neighbouring pairs of SMs are in different groups, every sixteenth SM is in the same one.
WL_FN bool should_decode(unsigned sm, unsigned share) {
  constexpr unsigned kGolden = 40503;  // golden ratio, of 2^16: its multiples lie evenly
  const unsigned place = sm / 16 * kGolden + sm % 2 * 0x8000u + sm % 16 / 2 * 0x2000u;
  return (place & 0xffffu) < share;
}

// Draws a number for this CTA. CTAs that want to decode take numbers from the first on, the others
// from the last backwards. One counter holds how many CTAs of either kind have drawn. If a kind has
// more CTAs than numbers, the surplus CTAs get numbers of the other kind. The last CTA to draw
// leaves the counter at zero.
WL_FN unsigned draw_number(int& counter, bool decodes) {
  auto* drawn = reinterpret_cast<unsigned*>(&counter);
  const unsigned before = atomicAdd(drawn, decodes ? 1u : 0x10000u);
  const unsigned from_first = before & 0xffffu, from_last = before >> 16;
  if (from_first + from_last == gridDim.x - 1) *drawn = 0;
  return decodes ? from_first : gridDim.x - 1 - from_last;
}

// Finds which CTA of the plan this one is. The plan's first CTAs decode, but only a running CTA
// knows its SM. If no CTA decodes, or all do, no CTA waits for a number.
template <class K>
WL_FN void draw_cta(const typename K::Params& p, Shared<K> shared) {
  if (threadIdx.x == 0) {
    auto& header = header_of<K>(p);
    shared.claim_state().read(header);
    const unsigned decoding = header.num_decode_ctas;
    unsigned cta = blockIdx.x;
    if (decoding != 0 && decoding != gridDim.x) {
      const unsigned share = (decoding << 16) / gridDim.x;
      cta = draw_number(header.drawn, should_decode(sm_number(), share));
    }
    shared.claim_state().set_cta(cta);
  }
  __syncthreads();
}

template <class Prefill, class Decode>
WL_FN void run_role_kernel(const typename Prefill::Params& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  static_assert(Decode::kTileThreads == Sizes<Decode>::kThreads + kWarpSize &&
                    Decode::kTileThreads <= Prefill::kCtaThreads,
                "a decode tile is streamed by the first threads of the CTA");
  static_assert(!kInBoxes<typename Decode::Config> ||
                    (Prefill::Config::kBoxTokens == Decode::Config::kBlockKv &&
                     Prefill::Config::kBoxRowBytes == 2 * Sizes<Decode>::kBlock),
                "maps have the boxes of prefills");
  await_earlier_kernels();
  const Shared<Prefill> shared{shared_memory};
  draw_cta(p, shared);
  if (threadIdx.x < Decode::kTileThreads) {
    stream_lists<Decode>(p, shared_memory, shared.claim_state());
  }
  fence_async_proxy();  // tensor copies write where decode tiles were
  __syncthreads();
  run_groups(p, shared, [] {});
}

}  // namespace warploom::hopper
