// The portable attention kernel: FlashAttention-2's algorithm with mma.sync and cp.async, on sm_80
// and everything after it. Persistent CTAs run the plan's work items.
#pragma once

#include <warploom/merge.cuh>
#include <warploom/pipeline.cuh>

namespace warploom {

template <class K>
WL_FN void transform_queries(const Item<K>& item) {
  if constexpr (K::Variant::kHasQueryTransform) {
    transform_rows<QuerySeat<K>, QueryTile<K>, K::Config::kRows, Sizes<K>::kThreads>(
        item, item.arena.queries(), threadIdx.x, QueryRows<K>{item});
    __syncthreads();
  }
}

// Key and value transform of the tile whose turn it is.
template <class K>
WL_FN void transform_staged(const Item<K>& item, const KeyPipeline<K>& pipeline) {
  using S = Sizes<K>;
  using O = Operands<K>;
  using Stored = typename S::KvElement;
  if constexpr (O::kTransformsKeys) {
    transform_tile<KeySeat<K>, KeyTile<K>, Stored, typename O::Keys, S::kGroupKeys,
                   S::kGroupThreads>(item, pipeline.keys(), pipeline.new_keys(), pipeline.thread(),
                                     pipeline.columns());
  }
  if constexpr (O::kTransformsValues) {
    transform_tile<ValueSeat<K>, ValueTile<K>, Stored, typename O::Values, S::kGroupKeys,
                   S::kGroupThreads>(item, pipeline.values(), pipeline.new_values(),
                                     pipeline.thread(), pipeline.columns());
  }
  if constexpr (O::kTransformsKeys || O::kTransformsValues) sync_group<K>();
}

// What a key's value is multiplied with, at its weight instead. 0 * NaN is not 0.
template <class K>
WL_FN float value_scale(const Item<K>& item, const Columns<K>& columns, int key) {
  const float scale = K::Variant::value_scale(item.p, item.tile(), columns.kv_pos(key));
  return columns.exists(key) ? scale : 0.0f;
}

// Walks the keys of an item; leaves unnormalised output and softmax statistics in registers.
template <class K>
WL_FN void attend(const Item<K>& item, Softmax<K>& softmax, typename WarpMma<K>::Output& output) {
  using Variant = typename K::Variant;
  using Mma = WarpMma<K>;
  KeyPipeline<K> pipeline(item);
  pipeline.look_up();
  __syncthreads();
  copy_queries(item, item.arena.queries());
  pipeline.start();
  pipeline.wait();
  __syncthreads();  // the queries and the positions of rows are everyone's
  const ThreadRows<K> rows(item);
  transform_queries(item);
  const auto queries = Mma::query_reader(item.arena.queries());
  const auto weight = [&](int r, int key, float logit) {
    const float p = Variant::kSoftmax ? softmax.probability(r, logit) : logit;
    if constexpr (Variant::kScalesValues) return p * value_scale(item, pipeline.columns(), key);
    return p;
  };
  while (pipeline.has_tile()) {
    typename Mma::Scores scores;
    pipeline.wait();
    pipeline.copy_ahead();
    transform_staged(item, pipeline);
    Mma::scores(queries, Mma::key_reader(pipeline.new_keys()), scores);
    transform_logits(item, rows, pipeline.columns(), pipeline.is_full(), scores);
    if constexpr (Variant::kSoftmax) softmax.update(scores, output);
    Mma::accumulate(scores, Mma::value_reader(pipeline.new_values()), weight, output);
    pipeline.advance();
  }
  if constexpr (Variant::kSoftmax) softmax.finish();
}

template <class K>
WL_FN void run_item(const Item<K>& item) {
  typename WarpMma<K>::Output output = {};
  Softmax<K> softmax(softmax_factor<K>(item.p));
  attend(item, softmax, output);
  cute::cp_async_wait<0>();
  __syncthreads();  // the staged tiles are read; the slabs take their place
  if constexpr (Sizes<K>::kSplitKeys) {
    write_joined_rows(item, softmax, output);
  } else {
    write_rows(item, softmax, output);
  }
  if (item.facts().merge >= 0) {
    const int2 merge = __ldg(reinterpret_cast<const int2*>(item.p.merges) + item.facts().merge);
    if (is_last_arrival(item, merge.y)) merge_slots(item, merge.x, merge.y);
  }
}

template <class K>
WL_FN void run_portable_kernel(const typename K::Params& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  const Item<K> item{p, {shared_memory}};
  int index = __ldg(p.cta_indptr + blockIdx.x);
  while (index < __ldg(p.cta_indptr + blockIdx.x + 1)) {
    item.open(index, threadIdx.x, Sizes<K>::kThreads);
    __syncthreads();
    run_item(item);
    index = item.facts().index + 1;
    __syncthreads();  // slabs and facts are read; the next item takes their place
  }
}

}  // namespace warploom
