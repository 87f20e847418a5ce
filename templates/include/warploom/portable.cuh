// The portable attention kernel: FlashAttention-2's algorithm with mma.sync and cp.async, on sm_80 and
// everything after it. Persistent CTAs run the plan's work items.
#pragma once

#include <warploom/merge.cuh>
#include <warploom/pipeline.cuh>

namespace warploom {

template <class K>
WL_FN void transform_queries(const Item<K>& item) {
  if constexpr (K::Variant::kHasQueryTransform) {
    transform_rows<QuerySeat<K>, QueryTile<K>, K::Config::kRows, Sizes<K>::kThreads>(
        item, item.arena.queries(), item.rows, threadIdx.x, [&](int row) { return item.row(row); });
    __syncthreads();
  }
}

// Key or value transform of the tile whose turn it is.
template <template <class> class Seat, class Tile, class K>
WL_FN void transform_tokens(const Item<K>& item, const KeyPipeline<K>& pipeline,
                            typename K::Config::Element* staged) {
  using S = Sizes<K>;
  const Columns<K> columns = pipeline.columns();
  transform_rows<Seat<K>, Tile, S::kGroupKeys, S::kGroupThreads>(
      item, staged, columns.count, pipeline.thread(),
      [&](int row) { return columns.kv_pos(row); });
  sync_group<K>();
}

// Walks the keys of an item; leaves unnormalised output and softmax statistics in registers.
template <class K>
WL_FN void attend(const Item<K>& item, Softmax<K>& softmax,
                  typename WarpMma<K>::Output& output) {
  using Variant = typename K::Variant;
  using Mma = WarpMma<K>;
  item.leave();
  __syncthreads();
  KeyPipeline<K> pipeline(item);
  copy_queries(item, item.arena.queries());
  pipeline.fill();
  pipeline.wait();
  __syncthreads();  // the queries and the positions of rows are everyone's
  const ThreadRows<K> rows(item);
  transform_queries(item);
  const auto queries = Mma::query_reader(item.arena.queries());
  if constexpr (Variant::kSoftmax) softmax.rest(item.arena);
  while (pipeline.has_tile()) {
    typename Mma::Scores scores;
    pipeline.wait();
    pipeline.copy_next_values();
    if constexpr (Variant::kHasKeyTransform) {
      transform_tokens<KeySeat, KeyTile<K>>(item, pipeline, pipeline.keys());
    }
    Mma::scores(queries, Mma::key_reader(pipeline.keys()), scores);
    pipeline.wait();
    pipeline.copy_next_keys();
    if constexpr (Variant::kHasValueTransform) {
      transform_tokens<ValueSeat, ValueTile<K>>(item, pipeline, pipeline.values());
    }
    transform_logits(item, rows, pipeline.columns(), pipeline.visit().is_full(), scores);
    if constexpr (Variant::kSoftmax) {
      softmax.take_up(item.arena);
      softmax.update(scores, output);
    }
    const auto probability = [&](int r, float logit) {
      return Variant::kSoftmax ? softmax.probability(r, logit) : logit;
    };
    Mma::accumulate(scores, Mma::value_reader(pipeline.values()), probability, output);
    if constexpr (Variant::kSoftmax) softmax.rest(item.arena);
    pipeline.advance();
  }
  if constexpr (Variant::kSoftmax) {
    softmax.take_up(item.arena);
    softmax.finish();
  }
}

template <class K>
WL_FN void run_item(const typename K::Params& p, Arena<K> arena, int index) {
  typename WarpMma<K>::Output output = {};
  Softmax<K> softmax(softmax_factor<K>(p));
  attend(Item<K>::read(p, arena, index), softmax, output);
  cute::cp_async_wait<0>();
  __syncthreads();  // the staged tiles are read; the slabs take their place
  const Item<K> item = Item<K>::take_up(p, arena);
  if constexpr (Sizes<K>::kSplitKeys) {
    write_joined_rows(item, softmax, output);
  } else {
    write_rows(item, softmax, output);
  }
  if (item.work.merge >= 0) {
    const int2 merge = __ldg(reinterpret_cast<const int2*>(p.merges) + item.work.merge);
    if (is_last_arrival(item, merge.y)) merge_slots(item, merge.x, merge.y);
  }
}

template <class K>
WL_FN void run_portable_kernel(const typename K::Params& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  const Arena<K> arena{shared_memory};
  int index = __ldg(p.cta_indptr + blockIdx.x), end = __ldg(p.cta_indptr + blockIdx.x + 1);
  while (index < end) {
    if (threadIdx.x == 0) arena.kept().index = index, arena.kept().end = end;
    run_item(p, arena, index);
    index = arena.kept().index + 1;
    end = arena.kept().end;
    __syncthreads();  // slabs and what was kept are read; the next item takes their place
  }
}

}  // namespace warploom
