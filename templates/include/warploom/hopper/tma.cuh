// Bulk tensor copies from global to shared memory.
#pragma once

#include <cute/arch/util.hpp>

#include <warploom/hopper/barrier.cuh>

namespace warploom {

// The driver's opaque description of a tensor, by value in the kernel's parameters.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

}  // namespace warploom

namespace warploom::hopper {

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

}  // namespace warploom::hopper
