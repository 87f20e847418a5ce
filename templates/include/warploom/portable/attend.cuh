// The loop over an item's tiles of keys: FlashAttention-2's algorithm.
#pragma once

#include <warploom/compute/output.cuh>
#include <warploom/hooks/tile_transform.cuh>
#include <warploom/staging/pipeline.cuh>

namespace warploom {

template <class Hook, class Tile, class NewTile, class Pipeline, class K, class NewElement>
WL_FN void transform_keys(const Pipeline& pipeline, const Item<K>& item, const void* staged,
                          NewElement* changed) {
  using S = Sizes<K>;
  const LaneStates<Hook, K> states(item, pipeline.thread());
  const Columns<K> columns = pipeline.columns(item);
  TileTransform<Hook, Tile, typename S::KvElement, NewTile, S::kStagingKeys, S::kStagingThreads, 1,
                kVector, K, Columns<K>>(item, states, pipeline.thread(), columns)
      .transform(staged, changed);
}

// Key and value transform of the tile whose turn it is.
template <class K, class Pipeline>
WL_FN void transform_staged(const Item<K>& item, const Pipeline& pipeline) {
  using O = Operands<K>;
  if constexpr (O::kTransformsKeys) {
    transform_keys<KeyHook<K>, KeyTile<K>, typename O::Keys>(pipeline, item, pipeline.keys(),
                                                             pipeline.new_keys());
  }
  if constexpr (O::kTransformsValues) {
    transform_keys<ValueHook<K>, ValueTile<K>, typename O::Values>(
        pipeline, item, pipeline.values(), pipeline.new_values());
  }
  if constexpr (O::kTransformsKeys || O::kTransformsValues) sync_group<K>();
}

// Walks the keys of an item; leaves unnormalised output and softmax statistics in registers.
template <class K, class Pipeline>
WL_FN void attend(const Item<K>& item, Pipeline& pipeline, Softmax<K>& softmax,
                  typename WarpMma<K>::Output& output) {
  using Variant = typename K::Variant;
  using Mma = WarpMma<K>;
  using Staged = StagedOperands<K>;
  const ThreadRows<K> rows(item);
  const LinearBias<K> bias(item, rows);
  const typename Mma::Queries queries(item.arena.queries());
  while (pipeline.has_tile()) {
    typename Mma::Scores scores;
    ValueScales<K> scales(item);
    scales.read_ahead(item, pipeline.columns(item));
    const ThreadColumns<K> ahead(item, rows, pipeline.columns(item), pipeline.visit());
    pipeline.wait();
    pipeline.copy_ahead();
    transform_staged(item, pipeline);
    Mma::scores(queries, Staged::key_reader(pipeline.new_keys()), scores);
    queries.rescale(scores);
    transform_logits(item, rows, pipeline.columns(item), pipeline.visit(), scores, ahead);
    bias.add(item, rows, pipeline.columns(item), scores, softmax);
    scales.read(item, pipeline.columns(item));
    if constexpr (Variant::kSoftmax) softmax.update(scores, scales, output);
    const auto weight = [&](int r, int c, float logit) {
      return scales.apply(c, Variant::kSoftmax ? softmax.probability(r, logit) : logit);
    };
    pipeline.clear_absent(pipeline.columns(item));
    Mma::accumulate(scores, Staged::value_reader(pipeline.new_values()), weight, output);
    pipeline.advance();
  }
  if constexpr (Variant::kSoftmax) softmax.finish();
}

}  // namespace warploom
