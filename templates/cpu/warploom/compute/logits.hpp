// The scalar hooks on a row of logits: transform and mask, in a loop over keys that the compiler
// turns into vectors.
#pragma once

#include <warploom/gather.hpp>

namespace warploom {

// What a masked logit becomes: no weight at all.
template <class Variant>
inline constexpr float kMasked = Variant::kSoftmax ? -kInfinity : 0.0f;

// Factors of q.k: `early` before the hooks, `late` after them, on the way to base 2. A positive
// scale waits for the softmax, which multiplies anyway; other signs would turn the maximum into a
// minimum, and a transform wants natural units.
struct LogitScale {
  float early, late;
};
template <class Variant>
WL_INLINE LogitScale logit_scale(float sm_scale) {
  if (!Variant::kSoftmax) return {sm_scale, 1.0f};
  if (Variant::kHasLogitsTransform || !(sm_scale > 0.0f)) return {sm_scale, kLog2e};
  return {1.0f, sm_scale * kLog2e};
}

// What the variant hoists for the tile and for column j, as row r has it.
template <class K>
WL_INLINE auto tile_state(const Item<K>& item, int r) {
  if constexpr (K::Config::kComposed) {
    return item.packed.state[r];
  } else {
    return item.state;
  }
}
template <class K>
WL_INLINE auto column_state(const Item<K>& item, const KeyTile<K>& keys, int r, int j) {
  if constexpr (K::Config::kComposed) {
    return K::Variant::col_state(item.p, item.tile_of(r), item.packed.state[r], keys.position(j));
  } else {
    return keys.state[j];
  }
}

// Records what the row sees of keys [begin, end), from products that wait for `sm_scale`.
template <class K, bool kMask>
__attribute__((noinline)) void record_logits(const Item<K>& item, const KeyTile<K>& keys, int r,
                                             int begin, int end, const float* s) {
  using Variant = typename K::Variant;
  const typename K::Params& p = item.p;
  const TileInfo tile = item.tile_of(r);
  const RowInfo row = item.row(r);
  const auto state = tile_state(item, r);
  for (int j = begin; j < end; ++j) {
    const int kv_pos = keys.position(j);
    if constexpr (kMask) {
      const auto column = column_state(item, keys, r, j);
      if (!Variant::mask(p, tile, state, row, item.row_state[r], kv_pos, column)) continue;
      if (K::Config::kColumnPositions && kv_pos >= tile.kv_len) continue;
    }
    Variant::record(p, tile, row, kv_pos, s[j] * p.sm_scale);
  }
}

// Logits of row r for keys [begin, end) in place, from products with the factor `scale` to come.
// Not inlined, so that `__restrict` holds.
template <class K, bool kMask>
__attribute__((noinline)) void apply_logits(const Item<K>& item, const KeyTile<K>& keys, int r,
                                            int begin, int end, float scale, float* __restrict s) {
  using Variant = typename K::Variant;
  using Config = typename K::Config;
  const typename K::Params& p = item.p;
  const TileInfo tile = item.tile_of(r);
  const RowInfo row = item.row(r);
  const auto state = tile_state(item, r);
  const auto row_state = item.row_state[r];
  for (int j = begin; j < end; ++j) {
    const int kv_pos = keys.position(j);
    const auto column = column_state(item, keys, r, j);
    float x = s[j] * scale;
    if constexpr (Variant::kHasLogitsTransform) {
      x = Variant::logits(p, tile, state, row, row_state, kv_pos, column, x);
    }
    if constexpr (kMask) {
      bool visible = Variant::mask(p, tile, state, row, row_state, kv_pos, column);
      if constexpr (Config::kColumnPositions) visible = visible & (kv_pos < tile.kv_len);
      x = visible ? x : kMasked<Variant>;
    }
    s[j] = x;
  }
}

}  // namespace warploom
