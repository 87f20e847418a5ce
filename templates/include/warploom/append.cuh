// New keys and values into a paged cache, vector by vector.
#pragma once

#include <warploom/device/overlap.cuh>
#include <warploom/team_vector.cuh>

#include <warploom/append_base.hpp>

namespace warploom {

// Appends one vector; all teams of a warp come here together, those without work too.
template <class Hook, int kLanes, class K>
WL_FN void append_vector(const typename K::Params& p, const AppendPlace& place, int row, int head,
                         int lane) {
  using From = typename K::Config::Element;
  using To = typename K::Config::KvElement;
  const TeamLane<Hook, kLanes> own(lane);
  TeamRow<Hook, From> x;
  x.load(Hook::from(p, row, head), own.first);
  const TileInfo tile = tile_of(p, place, head);
  const TeamStates<Hook> states(p, tile, own.first);
  const auto made = transformed<To>(p, tile, place.kv_pos, x, own, states);
  if (place.exists && own.counts) store_vector(Hook::to(p, place, head) + own.first, made);
}

// All new tokens, by all threads of the grid.
template <class K>
WL_FN void run_append(const typename K::Params& p) {
  using C = typename K::Config;
  constexpr int kLanes = team_lanes(C::kHeadDimQk > C::kHeadDimV ? C::kHeadDimQk : C::kHeadDimV);
  await_earlier_kernels();
  const unsigned heads = p.num_kv_heads;
  const int rows = max(min(p.num_rows, p.indptr[p.num_requests]), 0);
  const unsigned vectors = rows * heads;  // an int: append_args.py
  const unsigned teams = gridDim.x * blockDim.x / kLanes;
  const unsigned team = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
  const unsigned in_warp = threadIdx.x % kWarpSize / kLanes;
  for (unsigned first = team - in_warp; first < vectors; first += teams) {
    const bool counts = first + in_warp < vectors;
    const unsigned task = counts ? first + in_warp : vectors - 1;
    const int row = task / heads, head = task % heads;
    AppendPlace place = place_of(p, row, C::kPageSize);
    place.exists = place.exists && counts;
    append_vector<NewKey<K>, kLanes, K>(p, place, row, head, threadIdx.x % kLanes);
    append_vector<NewValue<K>, kLanes, K>(p, place, row, head, threadIdx.x % kLanes);
  }
}

}  // namespace warploom
