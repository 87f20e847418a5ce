// The portable kernel for tiles of one query row (decoding without groups of heads): no tensor
// cores, of whose rows 15 would be padding, and no staging.
//
// A warp reads its keys and values straight into registers, 16 bytes per lane and load;
// neighbouring lanes share a stored row. Sums over those lanes leave each lane with the logit of
// one key, on which it runs the scalar hooks; its weight goes back, by shuffles, to the lanes that
// hold the key's value. While one of the two products is computed, the operand of the other is in
// flight, and many warps hide the remaining latency.
#pragma once

#include <warploom/compute/row_softmax.cuh>
#include <warploom/compute/warp_rows.cuh>
#include <warploom/device/vector.cuh>
#include <warploom/hooks/tile_transform.cuh>
#include <warploom/items/merge.cuh>
#include <warploom/items/stamp.cuh>
#include <warploom/portable/single_arena.cuh>

namespace warploom {

// A warp's share of an item: its keys, and what they add to the output.
template <class K>
class SingleRow {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Variant = typename K::Variant;
  using KvElement = typename C::KvElement;
  using Keys = WarpRows<KvElement, C::kHeadDimQk, S::kStagingKeys>;
  using Values = WarpRows<KvElement, C::kHeadDimV, S::kStagingKeys>;

  static_assert(!C::kComposed, "rows of several requests share a tile of composed plans");
  static_assert(!Variant::kHasKeyTransform &&
                    (!Variant::kHasValueTransform || Variant::kScalesValues),
                "keys and values are not staged, where their hooks could see them");

  // Keys of a warp's tile lie a fixed distance apart.
  static constexpr bool kInOneBlock =
      !C::kIndexed || (!C::kColumnPositions && C::kBlockKv % S::kStagingKeys == 0);

  // A tile, and a block: the one that holds all of the tile or, if the tile may lie in several, the
  // one of this lane's own key.
  struct Tile {
    Visit visit;
    int block;
  };

 public:
  WL_FN explicit SingleRow(const Item<K>& item)
      : item_(item),
        walk_(item, int(threadIdx.x / kWarpSize)),
        softmax_{softmax_factor<K>(item.p)} {}

  // Walks the warp's keys.
  WL_FN void attend() {
    // Absent keys have weight 0, so their registers may keep keys from before. Absent values must
    // be zeros, since 0 * infinity is NaN.
    uint4 keys[Keys::kLoads] = {}, values[Values::kLoads] = {};
    Tile now = find(), next = find();
    read<Keys>(key_rows(item_), now, keys);
    read<Values>(value_rows(item_), now, values);
    take_query();
    const auto of_tile = Variant::tile_state(item_.p, item_.tile());
    const RowInfo row = item_.row(0);
    const auto of_row = Variant::row_state(item_.p, item_.tile(), of_tile, row);
    while (now.visit.exists()) {
      const Tile after = find();
      const float score = multiply(keys);
      read<Keys>(key_rows(item_), next, keys);
      accumulate(values, weight(now, apply_hooks(now, of_tile, row, of_row, score)));
      if (!next.visit.is_full()) clear(values);
      read<Values>(value_rows(item_), next, values);
      now = next;
      next = after;
    }
    if constexpr (Variant::kSoftmax) softmax_.template finish<Keys::kOwners>();
  }

  // Merges the results of all warps, in their order, and writes the row.
  WL_FN void write() {
    const unsigned warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    store(int(warp));
    __syncthreads();
    if (warp > 0) return;
    float weight[C::kWarps];
    const SoftmaxState state = warp_weights<1>(item_, 0, softmax_.factor, weight);
    for (unsigned at = lane * 4; at < C::kHeadDimV; at += kWarpSize * 4) {
      float4 merged = {};
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) add(merged, weight[w], item_.arena.slab_row(w) + at);
      *reinterpret_cast<float4*>(item_.arena.slab_row(0) + at) = merged;
    }
    __syncwarp();
    RowStore<K>::write(item_, 0, lane < S::kRowThreads, item_.arena.slab_row(0), state);
  }

 private:
  WL_FN Tile find() {
    const Visit visit = walk_.next();
    if constexpr (!C::kIndexed) return {visit, 0};
    return {visit, block_of(item_, kInOneBlock ? visit.begin() : place(visit))};
  }
  WL_FN static int place(const Visit& visit) { return visit.begin() + Keys::own_key(); }
  WL_FN bool exists(const Tile& tile) const {
    if constexpr (!kInOneBlock) return tile.block >= 0;
    return place(tile.visit) < item_.facts().places.end;
  }
  WL_FN int kv_pos(const Tile& tile) const {
    if constexpr (!C::kColumnPositions) return item_.facts().kv_pos + place(tile.visit);
    return tile.block < 0 ? -1 : tile.block * C::kBlockKv + place(tile.visit) % C::kBlockKv;
  }

  // The value of the lane that owns the key of which this lane has a part in a load.
  template <class Rows, class T>
  WL_FN static T of_owner(T its, int load) {
    if constexpr (Rows::kLanes == Keys::kLanes) {  // constants, not registers
      return __shfl_sync(kAllLanes, its, load * Keys::kOwners, Keys::kLanes);
    } else {
      return __shfl_sync(kAllLanes, its, Keys::owner(Rows::key(load)));
    }
  }

  template <class Rows>
  WL_FN void read(const TokenRows& tokens, const Tile& tile, uint4 (&words)[Rows::kLoads]) const {
    const int first = kInOneBlock ? tile.visit.begin() + Rows::key(0) : place(tile.visit);
    const int token = C::kIndexed ? first % C::kBlockKv : first;
    const half_t* row = tokens.row(TokenSlots<C>::of(tile.block), token);
    const long long from = reinterpret_cast<long long>(row);
    if constexpr (kInOneBlock) {
      const int count = Rows::in_row() ? item_.facts().places.end - first : 0;
      const long long step = tokens.token_stride * (2 * Rows::kAtOnce);
#pragma unroll
      for (int i = 0; i < Rows::kLoads; ++i) {
        load_once(from + Rows::bytes() + i * step, i * Rows::kAtOnce < count, words[i]);
      }
    } else {  // each lane knows where its own key lies
      const long long mine = exists(tile) ? from : kAbsent;
#pragma unroll
      for (int i = 0; i < Rows::kLoads; ++i) {
        const long long its = of_owner<Rows>(mine, i);
        load_once(its + Rows::bytes(), its >= 0 && Rows::in_row(), words[i]);
      }
    }
  }

  WL_FN static void clear(uint4 (&words)[Values::kLoads]) {
#pragma unroll
    for (uint4& word : words) word = {};
  }

  // Loads the query's numbers that this lane multiplies with numbers of keys.
  WL_FN void take_query() {
    using Element = typename C::Element;
    const Element* row = static_cast<const Element*>(item_.p.q) + item_.q_offset(item_.row(0));
    if constexpr (Variant::kHasQueryTransform) row = transformed(row);
    constexpr int kVectors = Keys::kNumbers / kVector;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      uint4 words = {};
      if (Keys::in_row()) words = reinterpret_cast<const uint4*>(row + Keys::column())[i];
      unpack(words, Element{}, query_ + i * kVector);
    }
  }
  // The query row after its hook; waits for all warps.
  WL_FN const typename C::Element* transformed(const typename C::Element* row) const {
    using Element = typename C::Element;
    Element* staged = item_.arena.query();
    if (threadIdx.x < kWarpSize) {
      static_assert(C::kHeadDimQk <= kWarpSize * kVector,
                    "a vector for each lane is the whole row");
      if (const int at = threadIdx.x * kVector; at < C::kHeadDimQk) {
        *reinterpret_cast<uint4*>(staged + at) = *reinterpret_cast<const uint4*>(row + at);
      }
      __syncwarp();
      const LaneStates<QueryHook<K>, K> lanes(item_, threadIdx.x);
      transform_rows<QueryHook<K>, StagedQuery, 1, kWarpSize>(item_, lanes, staged, threadIdx.x,
                                                              QueryRows<K>{item_});
    }
    __syncthreads();
    return staged;
  }
  struct StagedQuery {
    static constexpr int kElements = S::kDimQk, kWidth = S::kDimQk;
    WL_FN static int offset(int /*row*/, int lane) { return lane; }
  };

  // The product of the query and this lane's own key.
  WL_FN float multiply(const uint4 (&keys)[Keys::kLoads]) const {
    float parts[Keys::kLoads];
#pragma unroll
    for (int i = 0; i < Keys::kLoads; ++i) {
      float key[Keys::kNumbers];
      unpack(keys[i], KvElement{}, key);
      parts[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < Keys::kNumbers; ++j) parts[i] = ::fmaf(query_[j], key[j], parts[i]);
    }
    return Keys::sum(parts);
  }

  // The logit of this lane's own key.
  template <class OfTile, class OfRow>
  WL_FN float apply_hooks(const Tile& tile, const OfTile& of_tile, const RowInfo& row,
                          const OfRow& of_row, float score) const {
    const auto& p = item_.p;
    if (!scales_late<K>(p)) score *= p.sm_scale;
    if constexpr (Variant::kRecords) record(tile, of_tile, row, of_row, score);
    if (!Variant::kHasLogitsTransform && tile.visit.is_full()) return score;
    const int position = kv_pos(tile);
    const auto column = Variant::col_state(p, item_.tile(), of_tile, position);
    if constexpr (Variant::kHasLogitsTransform) {
      score = Variant::logits(p, item_.tile(), of_tile, row, of_row, position, column, score);
    }
    if (tile.visit.is_full()) return score;
    bool is_visible = exists(tile);
    if constexpr (Variant::kHasLogitsMask) {
      is_visible &= Variant::mask(p, item_.tile(), of_tile, row, of_row, position, column);
    }
    return is_visible ? score : Variant::kSoftmax ? -kInfinity : 0.0f;
  }

  // One of the lanes that own a key stores what is recorded of it.
  template <class OfTile, class OfRow>
  WL_FN void record(const Tile& tile, const OfTile& of_tile, const RowInfo& row,
                    const OfRow& of_row, float score) const {
    const auto& p = item_.p;
    if (threadIdx.x % Keys::kOwners != 0 || !exists(tile)) return;
    const int position = kv_pos(tile);
    if (Variant::kHasLogitsMask && !tile.visit.is_full()) {
      const auto column = Variant::col_state(p, item_.tile(), of_tile, position);
      if (!Variant::mask(p, item_.tile(), of_tile, row, of_row, position, column)) return;
    }
    const float logits = scales_late<K>(p) ? score * p.sm_scale : score;
    Variant::record(p, item_.tile(), row, position, logits);
  }

  // The weight of this lane's own value. Scales of absent keys are not used: 0 * NaN is not 0.
  WL_FN float weight(const Tile& tile, float logit) {
    float weight = logit;
    if constexpr (Variant::kSoftmax) {
      float rescale;
      if (softmax_.follow(logit, rescale)) {
#pragma unroll
        for (float& x : output_) x *= rescale;
      }
      weight = softmax_.probability(logit);
    }
    if constexpr (Variant::kScalesValues) {
      const float scale = Variant::value_scale(item_.p, item_.tile(), kv_pos(tile), C::kHeadDimV);
      weight *= exists(tile) ? scale : 0.0f;
    }
    return weight;
  }

  WL_FN void accumulate(const uint4 (&values)[Values::kLoads], float weight) {
#pragma unroll
    for (int i = 0; i < Values::kLoads; ++i) {
      const float w = of_owner<Values>(weight, i);
      float value[Values::kNumbers];
      unpack(values[i], KvElement{}, value);
#pragma unroll
      for (int j = 0; j < Values::kNumbers; ++j) output_[j] = ::fmaf(w, value[j], output_[j]);
    }
  }

  // Puts the warp's result into its slab.
  WL_FN void store(int warp) {
#pragma unroll
    for (int distance = Values::kLanes; distance < kWarpSize; distance *= 2) {
#pragma unroll
      for (float& x : output_) x += __shfl_xor_sync(kAllLanes, x, distance);
    }
    const unsigned lane = threadIdx.x % kWarpSize;
    if (lane == 0) item_.arena.statistics(warp) = {softmax_.largest, softmax_.sum};
    if (lane >= Values::kLanes || !Values::in_row()) return;
    float* to = item_.arena.slab_row(warp) + Values::column();
#pragma unroll
    for (int j = 0; j < Values::kNumbers; j += 4) {
      *reinterpret_cast<float4*>(to + j) =
          make_float4(output_[j], output_[j + 1], output_[j + 2], output_[j + 3]);
    }
  }

  Item<K> item_;
  KeyWalk<K> walk_;
  RowSoftmax<K> softmax_;
  float query_[Keys::kNumbers];
  float output_[Values::kNumbers] = {};
};

template <class K>
WL_FN void run_single_kernel(const typename K::Params& p, char* shared_memory) {
  const int first = __ldg(p.cta_indptr + blockIdx.x), end = __ldg(p.cta_indptr + blockIdx.x + 1);
  auto opening = load_first_opening<K>(p, blockIdx.x);
  for (int i = first; i < end; ++i) {
    const Stamp<K> stamp(p, i);
    const Item<K> item{p, {shared_memory, i}};
    item.open(opening, i, threadIdx.x, Sizes<K>::kThreads);
    __syncthreads();  // and the slabs of the item before are read
    SingleRow<K> row(item);
    row.attend();
    row.write();
    merge_if_last(item);
    if (i + 1 < end) opening = load_opening<K>(p, i + 1);
  }
}

}  // namespace warploom
