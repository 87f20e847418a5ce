// The Hopper attention kernel (sm_90a): a producer group copies, one to three consumer groups of 64
// rows compute, and where a seat transforms queries, keys or values, another group does that
// between the two.
#pragma once

#include <warploom/hopper/consumer.cuh>
#include <warploom/hopper/producer.cuh>
#include <warploom/hopper/transformer.cuh>
#include <warploom/overlap.cuh>

namespace warploom::hopper {

// Registers of a thread of each role. Roles exchange what the CTA was launched with: giving
// consumers more than the others free would wait for ever. Wide heads fill 224 with accumulators; a
// producer that only issues tensor copies needs few. Two roles alone have as many as a thread can
// name.
template <class K>
struct RegisterBudget {
  using C = typename K::Config;
  static constexpr int kConsumers = C::kRows / 64;
  static constexpr int kRoles = kConsumers + 1 + kHasTransformer<K>;
  static constexpr bool kExchanges = kRoles > 2;
  static constexpr int kPool = kRoles == 4 ? 4 * 128 : kRoles * 168;
  static constexpr bool kNarrow = C::kHeadDimV <= 96;
  static constexpr bool kWide = C::kHeadDimV > 128 && C::kBulk;
  static constexpr bool kManyPanels = Sizes<K>::kDimV / Sizes<K>::kBlock > 4;
  static constexpr bool kNarrowParts =
      kHasTransformer<K> && kNarrow && (!C::kBulk || C::kHeadDimQk != Sizes<K>::kDimQk);
  // Rows that are gathered or padded keep a producer's registers, column states pass through them,
  // and so do the rows of more queries.
  static constexpr int kFewest = kNarrowParts                  ? 64
                                 : kHasTransformer<K> || kWide ? 56
                                 : kManyPanels                 ? 88
                                                               : 72;
  static constexpr int kProducer = kConsumers == 3             ? 80
                                   : Shared<K>::kStagesColumns ? kFewest + 16
                                                               : kFewest;
  static constexpr int kTransformer = !kHasTransformer<K> ? 0
                                      : kNarrowParts      ? 96
                                      : kNarrow           ? 104
                                                          : 72;
  static constexpr int kShare = (kPool - kProducer - kTransformer) / kConsumers;
  static constexpr int kConsumer = kShare < 240 ? kShare : 240;
  static_assert(kConsumers <= 3 && kRoles <= 4, "an SM has 65,536 registers");
  static_assert(kConsumer % 8 == 0, "registers change hands in eights");
  static_assert(C::kThreads == kRoles * 128,
                "codegen/tiles_hopper.py launches as many groups as there are roles");
};

template <class K>
WL_FN void init_barriers(Shared<K> shared) {
  using C = typename K::Config;
  auto& barriers = shared.barriers();
  for (int i = 0; i < Shared<K>::kItemStages; ++i) {
    barrier_init(&barriers.item_full[i], Arrivals<K>::kItem);
    barrier_init(&barriers.item_empty[i], Arrivals<K>::kReaders);
  }
  for (int i = 0; i < C::kQueryStages; ++i) {
    barrier_init(&barriers.q_landed[i], Arrivals<K>::kQueries);
    barrier_init(&barriers.q_full[i], Arrivals<K>::kFullQueries);
    barrier_init(&barriers.q_empty[i], Arrivals<K>::kConsumers);
  }
  for (int i = 0; i < C::kStages; ++i) {
    barrier_init(&barriers.k_landed[i], Arrivals<K>::kKeys);
    barrier_init(&barriers.k_full[i], Arrivals<K>::kFullKeys);
    barrier_init(&barriers.v_landed[i], Arrivals<K>::kValues);
    barrier_init(&barriers.v_full[i], Arrivals<K>::kFullValues);
    barrier_init(&barriers.k_empty[i], Arrivals<K>::kConsumers);
    barrier_init(&barriers.v_empty[i], Arrivals<K>::kConsumers);
  }
  barrier_init_fence();
}

template <class K>
WL_FN void run_hopper_kernel(const typename K::Params& p) {
  using Budget = RegisterBudget<K>;
  extern __shared__ __align__(1024) char shared_memory[];
  const Shared<K> shared{shared_memory};
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  await_earlier_kernels();
  const int group = __shfl_sync(kAllLanes, int(threadIdx.x) / 128, 0);
  if (group == Budget::kConsumers) {
    if constexpr (Budget::kExchanges) set_registers_down<Budget::kProducer>();
    produce(p, shared);
  } else if (kHasTransformer<K> && group > Budget::kConsumers) {
    if constexpr (Budget::kExchanges) set_registers_down<Budget::kTransformer>();
    if constexpr (kHasTransformer<K>) Transformer<K>(shared).run(p);
  } else {
    if constexpr (Budget::kExchanges) set_registers_up<Budget::kConsumer>();
    Consumer<K>(shared, group).run(p);
  }
}

}  // namespace warploom::hopper
