// How many arrivals complete a phase of each barrier, which depends on the threads that take part.
#pragma once

#include <warploom/hopper/shared.cuh>

namespace warploom::hopper {

constexpr int kProducerThreads = 128;
constexpr int kBulkQueryThreads = 64;  // of these, with tensor copies

// Arrivals that complete a phase of the barriers.
template <class K>
struct Arrivals {
  using Variant = typename K::Variant;
  static constexpr bool kBulk = K::Config::kBulk;
  static constexpr int kColumnThreads = kBulk && Shared<K>::kStagesColumns ? kBulkQueryThreads : 0;
  static constexpr int kItem = kBulk ? kBulkQueryThreads : kProducerThreads;
  static constexpr int kConsumers = K::Config::kRows / 64 * kArrivals<128>;
  static constexpr int kTransformer = kHasTransformer<K> ? kArrivals<128> : 0;
  // Readers of an item: these two, and a warp each that copies keys and values.
  static constexpr int kReaders =
      kConsumers + kTransformer + (kBulk ? 2 * kArrivals<kWarpSize> : 0);
  static constexpr int kQueries = kItem;  // copied by the same threads
  static constexpr int kValues = kBulk ? 1 : 2 * kProducerThreads;
  // Each lane that wrote positions arrives for itself.
  static constexpr int kKeys = kValues + (kBulk && K::Config::kColumnPositions ? kWarpSize : 0);
  // Arrivals on the barriers that consumers wait for.
  static constexpr int kChangers = Shared<K>::kWidensAhead ? kConsumers : kTransformer;
  static constexpr int kFullQueries = Shared<K>::kTwoPhaseQueries ? kTransformer : kQueries;
  static constexpr int kFullKeys = (Shared<K>::kTwoPhaseKeys ? kChangers : kKeys) + kColumnThreads;
  static constexpr int kFullValues = Shared<K>::kTwoPhaseValues ? kChangers : kValues;
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

}  // namespace warploom::hopper
