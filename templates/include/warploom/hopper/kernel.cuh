// The Hopper attention kernel (sm_90a): a producer warpgroup copies, one to three consumer
// warpgroups of 64 rows compute, and where a hook transforms queries, keys or values, or these have
// 8 bits, one more warpgroup does that in between.
#pragma once

#include <warploom/device/overlap.cuh>
#include <warploom/hopper/arrivals.cuh>
#include <warploom/hopper/consumer.cuh>
#include <warploom/hopper/producer.cuh>
#include <warploom/hopper/transformer.cuh>

namespace warploom::hopper {

// Runs consumers, producer, transformer; codegen/attention/hopper_registers.py divides registers.
template <class K, class BeforeWork>
WL_FN void run_groups(const typename K::Params& p, Shared<K> shared, const BeforeWork& await) {
  using C = typename K::Config;
  constexpr int kConsumers = C::kRows / 64;
  static_assert(C::kWarps == 4 * kConsumers, "four warps compute 64 rows");
  static_assert(kConsumers + C::kTransformer <= 3, "an SM has 65,536 registers");
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  await();
  const int group = __shfl_sync(kAllLanes, int(threadIdx.x) / 128, 0);
  if (group == kConsumers) {
    if constexpr (C::kProducerRegisters > 0) set_registers_down<C::kProducerRegisters>();
    produce(p, shared);
  } else if (C::kTransformer && group > kConsumers) {
    if constexpr (C::kTransformerRegisters > 0) set_registers_down<C::kTransformerRegisters>();
    if constexpr (C::kTransformer) Transformer<K>(shared).run(p);
  } else {
    if constexpr (C::kConsumerRegisters > 0) set_registers_up<C::kConsumerRegisters>();
    Consumer<K>(shared, group).run(p);
  }
}

template <class K>
WL_FN void run_hopper_kernel(const typename K::Params& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  run_groups(p, Shared<K>{shared_memory}, [] { await_earlier_kernels(); });
}

}  // namespace warploom::hopper
