// What only PTX says. `tests/emulation` has a header of this name for the host.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include <warploom/device/load.cuh>

namespace warploom {

// Whether copies may carry a hint for L2. ptxas of CUDA 13.0 wrote some that do wrongly, and such a
// kernel is compiled once more without (codegen/compilers/nvrtc.py).
#ifdef WARPLOOM_NO_CACHE_HINTS
constexpr bool kHintsL2 = false;
#else
constexpr bool kHintsL2 = true;
#endif

// createpolicy's answer for L2::evict_first, as a number: what is read once makes room first.
constexpr unsigned long long kEvictFirst = 0x12F0000000000000ull;

// cp.async of 16 bytes past L1, or of zeros: the source is then not read. CuTe's ZFILL atom says so
// by a size of 0 bytes, for which ptxas emits pointer arithmetic with every copy; a predicate costs
// nothing. `kOnce`: what is read will hardly be read again, and should not drive out what will.
template <bool kOnce = false, class Element>
WL_FN void copy_vector(const Element* from, Element* to, bool exists) {
  // A sign, because what tells absent rows from others is one.
  if constexpr (kOnce && kHintsL2) {
    asm volatile(
        "{\n"
        "  .reg .pred ignore;\n"
        "  setp.lt.s32 ignore, %2, 0;\n"
        "  cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, ignore, %3;\n"
        "}\n" ::"r"(cute::cast_smem_ptr_to_uint(to)),
        "l"(from), "r"(exists ? 0 : -1), "l"(kEvictFirst));
    return;
  }
  asm volatile(
      "{\n"
      "  .reg .pred ignore;\n"
      "  setp.lt.s32 ignore, %2, 0;\n"
      "  cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignore;\n"
      "}\n" ::"r"(cute::cast_smem_ptr_to_uint(to)),
      "l"(from), "r"(exists ? 0 : -1));
}

// Lets the cache line of an address come to L2.
WL_FN void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Two numbers, rounded to 16 bits.
WL_FN unsigned pack(half_t, float low, float high) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
WL_FN unsigned pack(bfloat16_t, float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Eight rows of eight packed 16-bit numbers, of which lane l has a pair of row l / 4; becomes a
// pair of column l / 4. Volatile: all lanes of the warp take part, so no branch may take it in.
WL_FN unsigned transpose(unsigned pair) {
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// threadIdx.x, read anew at each use: addresses that follow from it would otherwise be kept over
// a loop, in registers that the accumulators need.
WL_FN unsigned cta_thread() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Of all multiprocessors; it moves on every 32 ns on some GPUs, every microsecond on others.
WL_FN long long global_nanoseconds() {
  long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
  return time;
}

// The multiprocessor that runs this CTA.
WL_FN unsigned sm_number() {
  unsigned number;
  asm("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

// Waits for that many threads of the CTA, always the same ones, at a hardware barrier of that
// number; 0 is __syncthreads. The lanes of a warp wait at the same place in the code.
WL_FN void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same for warps that wait at two places.
WL_FN void named_meet(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Counts the threads of a warp there, without waiting.
WL_FN void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Adds 1 and returns what was there. What threads of this CTA wrote before a barrier in front can
// be seen by whoever counts later and then meets a barrier of its own.
WL_FN unsigned count_release_acquire(unsigned* counter) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

WL_FN unsigned load_acquire(const unsigned* address) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

}  // namespace warploom
