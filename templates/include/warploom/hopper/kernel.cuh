// The Hopper attention kernel (sm_90a): a producer group copies, two consumer groups compute, and
// where a seat transforms queries, keys or values, another group does that between the two.
#pragma once

#include <warploom/hopper/consumer.cuh>
#include <warploom/hopper/producer.cuh>
#include <warploom/hopper/transformer.cuh>

namespace warploom::hopper {

// Registers of a thread of each role. The CTA's pool is what it was launched with, 168 for each of
// three groups or 128 for each of four: giving consumers more than the others free would wait for
// ever. Wide heads fill 224 registers with accumulators; a producer that only issues tensor copies
// needs few.
template <class K>
struct RegisterBudget {
  using C = typename K::Config;
  static constexpr bool kWide = C::kHeadDimV > 128 && C::kBulk;
  static constexpr bool kNarrow = C::kHeadDimV <= 64;
  static constexpr int kProducer = kHasTransformer<K> || kWide ? 56 : 72;
  static constexpr int kTransformer = !kHasTransformer<K> ? 0 : kNarrow ? 104 : 72;
  static constexpr int kConsumer = kHasTransformer<K> ? (kNarrow ? 176 : 192) : (kWide ? 224 : 216);
  static constexpr int kPool = kHasTransformer<K> ? 4 * 128 : 3 * 168;
  static_assert(C::kRows == 128, "two consumer groups of 64 rows");
  static_assert(C::kThreads == kPool / (kHasTransformer<K> ? 128 : 168) * 128,
                "codegen/tiles_hopper.py launches as many groups as there are roles");
  static_assert(kProducer + kTransformer + 2 * kConsumer == kPool,
                "roles exchange registers, they make none");
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
    barrier_init(&barriers.q_landed[i], Arrivals<K>::kQueries);
    barrier_init(&barriers.q_full[i], Arrivals<K>::kFullQueries);
    barrier_init(&barriers.q_empty[i], kGroups);
  }
  for (int i = 0; i < C::kStages; ++i) {
    barrier_init(&barriers.k_landed[i], Arrivals<K>::kKeys);
    barrier_init(&barriers.k_full[i], Arrivals<K>::kFullKeys);
    barrier_init(&barriers.v_landed[i], Arrivals<K>::kValues);
    barrier_init(&barriers.v_full[i], Arrivals<K>::kFullValues);
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
  } else if (kHasTransformer<K> && group > kGroups) {
    set_registers_down<RegisterBudget<K>::kTransformer>();
    if constexpr (kHasTransformer<K>) Transformer<K>(shared).run(p);
  } else {
    set_registers_up<RegisterBudget<K>::kConsumer>();
    Consumer<K>(shared, group).run(p);
  }
}

}  // namespace warploom::hopper
