// What only PTX says of Hopper: barriers, bulk tensor copies, exchange of registers.
// `tests/emulation` has a header of this name for the host.
#pragma once

#include <cute/arch/util.hpp>

#include <warploom/device/ptx.cuh>
#include <warploom/device/qualifiers.cuh>

namespace warploom {

// The driver's opaque description of a tensor, by value in the kernel's parameters.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

}  // namespace warploom

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

// Ends a barrier; its memory may be used for something else then.
WL_FN void barrier_end(Barrier* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(cute::cast_smem_ptr_to_uint(barrier))
               : "memory");
}

WL_FN void barrier_arrive(Barrier* barrier) {
  asm volatile(
      "mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(cute::cast_smem_ptr_to_uint(barrier))
      : "memory");
}

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

template <int kCount>
WL_FN void set_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
WL_FN void set_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Counts this thread's earlier cp.async copies on a barrier, once they are complete.
WL_FN void arrive_after_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                   cute::cast_smem_ptr_to_uint(barrier))
               : "memory");
}

// Loads the box at (column, token, head, block) of a [block, head, token, column] view.
WL_FN void tma_load(const void* map, Barrier* barrier, void* smem, int column, int token, int head,
                    int block) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(cute::cast_smem_ptr_to_uint(smem)),
      "l"(map), "r"(cute::cast_smem_ptr_to_uint(barrier)), "r"(column), "r"(token), "r"(head),
      "r"(block)
      : "memory");
}

// The same for data that will hardly be read again: L2 evicts it first.
WL_FN void tma_load_once(const void* map, Barrier* barrier, void* smem, int column, int token,
                         int head, int block) {
  if constexpr (!kHintsL2) return tma_load(map, barrier, smem, column, token, head, block);
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(cute::cast_smem_ptr_to_uint(smem)),
      "l"(map), "r"(cute::cast_smem_ptr_to_uint(barrier)), "r"(column), "r"(token), "r"(head),
      "r"(block), "l"(kEvictFirst)
      : "memory");
}

}  // namespace warploom::hopper
