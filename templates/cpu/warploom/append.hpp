// New keys and values into a paged cache, one vector after another.
#pragma once

#include <warploom/variant.hpp>

#include <warploom/append_base.hpp>

namespace warploom {

// Reductions over the lanes of a vector, in their order; a later one may read the earlier ones.
template <class Hook, class K, class X, int I = 0>
void reduce_vector(const typename K::Params& p, const TileInfo& tile, int kv_pos, const X& x,
                   float* r) {
  if constexpr (I < Hook::kReductions) {
    r[I] = Hook::template identity<I>();
    for (int lane = 0; lane < Hook::kHeadDim; ++lane) {
      const float part = Hook::template reduce<I>(p, tile, kv_pos, lane, x, r);
      r[I] = Hook::template combine<I>(r[I], part);
    }
    reduce_vector<Hook, K, X, I + 1>(p, tile, kv_pos, x, r);
  }
}

template <class Hook, class K>
void append_vector(const typename K::Params& p, const AppendPlace& place, int row, int head) {
  using To = typename K::Config::KvElement;
  const StoredVector<typename K::Config::Element> x{Hook::from(p, row, head)};
  const TileInfo tile = tile_of(p, place, head);
  float r[Hook::kReductions + 1];
  reduce_vector<Hook, K>(p, tile, place.kv_pos, x, r);
  To* to = Hook::to(p, place, head);
  const auto of_tile = Hook::tile_state(p, tile);
  for (int lane = 0; lane < Hook::kHeadDim; ++lane) {
    const auto state = Hook::lane_state(p, tile, of_tile, lane);
    to[lane] = from_float<To>(Hook::value(p, tile, place.kv_pos, state, lane, x, r));
  }
}

template <class K>
void run_append(const typename K::Params& p) {
  const int rows = min(p.num_rows, p.indptr[p.num_requests]);
  for (int row = 0; row < rows; ++row) {
    const AppendPlace place = place_of(p, row, K::Config::kPageSize);
    if (!place.exists) continue;
    for (int head = 0; head < p.num_kv_heads; ++head) {
      append_vector<NewKey<K>, K>(p, place, row, head);
      append_vector<NewValue<K>, K>(p, place, row, head);
    }
  }
}

}  // namespace warploom
