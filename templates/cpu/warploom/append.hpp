// New keys and values into a paged cache, one vector after another.
#pragma once

#include <warploom/variant.hpp>

#include <warploom/append_base.hpp>

namespace warploom {

// Reductions over the lanes of a vector, in their order; a later one may read the earlier ones.
template <class Seat, class K, class X, int I = 0>
void reduce_vector(const typename K::Params& p, const TileInfo& tile, int kv_pos, const X& x,
                   float* r) {
  if constexpr (I < Seat::kReductions) {
    r[I] = Seat::template identity<I>();
    for (int lane = 0; lane < Seat::kHeadDim; ++lane) {
      const float part = Seat::template reduce<I>(p, tile, kv_pos, lane, x, r);
      r[I] = Seat::template combine<I>(r[I], part);
    }
    reduce_vector<Seat, K, X, I + 1>(p, tile, kv_pos, x, r);
  }
}

template <class Seat, class K>
void append_vector(const typename K::Params& p, const AppendPlace& place, int row, int head) {
  using To = typename K::Config::KvElement;
  const StoredVector<typename K::Config::Element> x{Seat::from(p, row, head)};
  const TileInfo tile = tile_of(p, place, head);
  float r[Seat::kReductions + 1];
  reduce_vector<Seat, K>(p, tile, place.kv_pos, x, r);
  To* to = Seat::to(p, place, head);
  const auto of_tile = Seat::tile_state(p, tile);
  for (int lane = 0; lane < Seat::kHeadDim; ++lane) {
    const auto state = Seat::lane_state(p, tile, of_tile, lane);
    to[lane] = from_float<To>(Seat::value(p, tile, place.kv_pos, state, lane, x, r));
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
