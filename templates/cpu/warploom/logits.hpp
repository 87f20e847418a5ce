// The scalar seats on a row of logits: transform and mask, in a loop over keys that the compiler
// turns into vectors.
#pragma once

#include <warploom/gather.hpp>

namespace warploom {

// What a masked logit becomes: no weight at all.
template <class Variant>
inline constexpr float kMasked = Variant::kSoftmax ? -kInfinity : 0.0f;

// Factor of q.k as the product leaves it: the softmax wants base 2, a transform natural units
// first.
template <class Variant>
float product_scale(float sm_scale) {
  return Variant::kSoftmax && !Variant::kHasLogitsTransform ? sm_scale * kLog2e : sm_scale;
}

// Logits of row r for keys [begin, end) in place. Not inlined, so that `__restrict` holds.
template <class K, bool kMask>
__attribute__((noinline)) void apply_logits(const Item<K>& item, const KeyTile<K>& keys, int r,
                                            int begin, int end, float* __restrict s) {
  using Variant = typename K::Variant;
  using Config = typename K::Config;
  const typename K::Params& p = item.p;
  const TileInfo tile = item.tile;
  const RowInfo row = item.row(r);
  const auto state = item.state;
  const auto row_state = item.row_state[r];
  for (int j = begin; j < end; ++j) {
    const int kv_pos = keys.position(j);
    float x = s[j];
    if constexpr (Variant::kHasLogitsTransform) {
      x = Variant::logits(p, tile, state, row, row_state, kv_pos, keys.state[j], x);
      if constexpr (Variant::kSoftmax) x *= kLog2e;
    }
    if constexpr (kMask) {
      bool visible = Variant::mask(p, tile, state, row, row_state, kv_pos, keys.state[j]);
      if constexpr (Config::kColumnPositions) visible = visible & (kv_pos < tile.kv_len);
      x = visible ? x : kMasked<Variant>;
    }
    s[j] = x;
  }
}

}  // namespace warploom
