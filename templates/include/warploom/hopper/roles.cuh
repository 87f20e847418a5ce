// Prefill and decode in one launch (POD-Attention): each CTA streams its list of decode items with
// a tile of few rows, and those that it claims, and then does what there is of prefill as any
// Hopper kernel. The plan mostly gives a CTA one of the two, so that some SMs read memory while
// others compute.
#pragma once

#include <warploom/hopper/kernel.cuh>
#include <warploom/hopper/tensor_pipeline.cuh>
#include <warploom/portable/roles.cuh>

namespace warploom::hopper {

// A decode tile whose keys come by tensor maps of the boxes that the prefill tile has, where they
// can.
template <class K, bool kHasBoxes = kInBoxes<typename K::Config>>
struct DecodeArena : warploom::DecodeArena<K> {};
template <class K>
struct DecodeArena<K, true> : warploom::DecodeArena<K> {
  using Pipeline = TensorPipeline<K>;
};

// Whether the multiprocessor should decode if `share` of 2^16 do. They lie evenly over groups that
// share a way to L2 (GPCs), which carries 600 GB/s on an H200, the reads of 12 that decode:
// neighbouring pairs are of different groups, and every sixteenth is of the same one.
WL_FN bool should_decode(unsigned sm, unsigned share) {
  constexpr unsigned kGolden = 40503;  // of 2^16: multiples of it lie evenly
  const unsigned place = sm / 16 * kGolden + sm % 2 * 0x8000u + sm % 16 / 2 * 0x2000u;
  return (place & 0xffffu) < share;
}

// A number for this CTA: those that want to decode take numbers from the first on, the others from
// the last; one counter holds how many of both have drawn, and who finds that none is left of a
// kind has a number of the other. The last to draw leaves zero.
WL_FN unsigned draw_number(int& counter, bool decodes) {
  auto* drawn = reinterpret_cast<unsigned*>(&counter);
  const unsigned before = atomicAdd(drawn, decodes ? 1u : 0x10000u);
  const unsigned from_first = before & 0xffffu, from_last = before >> 16;
  if (from_first + from_last == gridDim.x - 1) *drawn = 0;
  return decodes ? from_first : gridDim.x - 1 - from_last;
}

// Which CTA of the plan this one is: the first ones decode, and which multiprocessors have these
// only they know. Where none decode, or all, nobody waits for a number.
template <class K>
WL_FN void draw_cta(const typename K::Params& p, Shared<K> shared) {
  if (threadIdx.x == 0) {
    auto& header = header_of<K>(p);
    shared.drawn().read(header);
    const unsigned decoding = header.num_decode_ctas;
    unsigned cta = blockIdx.x;
    if (decoding != 0 && decoding != gridDim.x) {
      const unsigned share = (decoding << 16) / gridDim.x;
      cta = draw_number(header.drawn, should_decode(sm_number(), share));
    }
    shared.drawn().be(cta);
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
    stream_lists<Decode>(p, shared_memory, shared.drawn());
  }
  fence_async_proxy();  // tensor copies write where decode tiles were
  __syncthreads();
  run_groups(p, shared, [] {});
}

}  // namespace warploom::hopper
