// The loop over an item's tiles of keys: FlashAttention-2's algorithm.
#pragma once

#include <warploom/output.cuh>
#include <warploom/pipeline.cuh>

namespace warploom {

// Key and value transform of the tile whose turn it is.
template <class K>
WL_FN void transform_staged(const Item<K>& item, const KeyPipeline<K>& pipeline) {
  using S = Sizes<K>;
  using O = Operands<K>;
  using Stored = typename S::KvElement;
  if constexpr (O::kTransformsKeys) {
    transform_tile<KeySeat<K>, KeyTile<K>, Stored, typename O::Keys, S::kGroupKeys,
                   S::kGroupThreads>(item, pipeline.keys(), pipeline.new_keys(), pipeline.thread(),
                                     pipeline.columns(item));
  }
  if constexpr (O::kTransformsValues) {
    transform_tile<ValueSeat<K>, ValueTile<K>, Stored, typename O::Values, S::kGroupKeys,
                   S::kGroupThreads>(item, pipeline.values(), pipeline.new_values(),
                                     pipeline.thread(), pipeline.columns(item));
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
WL_FN void attend(const Item<K>& item, KeyPipeline<K>& pipeline, Softmax<K>& softmax,
                  typename WarpMma<K>::Output& output) {
  using Variant = typename K::Variant;
  using Mma = WarpMma<K>;
  const ThreadRows<K> rows(item);
  const typename Mma::Queries queries(item.arena.queries());
  const auto weight = [&](int r, int key, float logit) {
    const float p = Variant::kSoftmax ? softmax.probability(r, logit) : logit;
    if constexpr (Variant::kScalesValues) return p * value_scale(item, pipeline.columns(item), key);
    return p;
  };
  while (pipeline.has_tile()) {
    typename Mma::Scores scores;
    pipeline.wait();
    pipeline.copy_ahead();
    transform_staged(item, pipeline);
    Mma::scores(queries, Mma::key_reader(pipeline.new_keys()), scores);
    queries.rescale(scores);
    transform_logits(item, rows, pipeline.columns(item), pipeline.is_full(), scores);
    if constexpr (Variant::kSoftmax) softmax.update(scores, output);
    Mma::accumulate(scores, Mma::value_reader(pipeline.new_values()), weight, output);
    pipeline.advance();
  }
  if constexpr (Variant::kSoftmax) softmax.finish();
}

}  // namespace warploom
