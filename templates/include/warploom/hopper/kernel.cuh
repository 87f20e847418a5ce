// The Hopper attention kernel (sm_90a): a producer group copies, two consumer groups compute.
#pragma once

#include <warploom/hopper/consumer.cuh>
#include <warploom/hopper/producer.cuh>

namespace warploom::hopper {

// Registers of a thread of either role. The CTA's pool is what it was launched with, 168 for each
// of three groups: giving consumers more than the producer frees would wait for ever. Wide heads
// fill 224 registers with accumulators; a producer that only issues tensor copies needs few.
template <class K>
struct RegisterBudget {
  using C = typename K::Config;
  static constexpr bool kWide = C::kHeadDimV > 128 && C::kBulk;
  static constexpr int kProducer = kWide ? 56 : 72;
  static constexpr int kConsumer = kWide ? 224 : 216;
  static_assert(C::kRows == 128, "two consumer groups of 64 rows");
  static_assert(kProducer + 2 * kConsumer == 3 * 168, "roles exchange registers, they make none");
};

template <class K>
WL_FN void init_barriers(Shared<K> shared) {
  using C = typename K::Config;
  constexpr int kGroups = C::kRows / 64;
  auto& barriers = shared.barriers();
  for (int i = 0; i < Shared<K>::kItemStages; ++i) {
    barrier_init(&barriers.item_full[i], Arrivals<K>::kItem);
    barrier_init(&barriers.item_empty[i], kGroups + Arrivals<K>::kReaders);
  }
  for (int i = 0; i < C::kQueryStages; ++i) {
    barrier_init(&barriers.q_full[i], Arrivals<K>::kQueries);
    barrier_init(&barriers.q_empty[i], kGroups);
  }
  for (int i = 0; i < C::kStages; ++i) {
    barrier_init(&barriers.k_full[i], Arrivals<K>::kKeys);
    barrier_init(&barriers.v_full[i], Arrivals<K>::kValues);
    barrier_init(&barriers.k_empty[i], kGroups);
    barrier_init(&barriers.v_empty[i], kGroups);
  }
  barrier_init_fence();
}

template <class K>
WL_FN void run_hopper_kernel(const typename K::Params& p) {
  constexpr int kGroups = K::Config::kRows / 64;
  extern __shared__ __align__(1024) char shared_memory[];
  const Shared<K> shared{shared_memory};
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  const int group = __shfl_sync(kAllLanes, int(threadIdx.x) / 128, 0);
  if (group == kGroups) {
    set_registers_down<RegisterBudget<K>::kProducer>();
    produce(p, shared);
  } else {
    set_registers_up<RegisterBudget<K>::kConsumer>();
    Consumer<K>(shared, group).run(p);
  }
}

}  // namespace warploom::hopper
