// New keys and values into a paged cache: a team of lanes for each vector, 8 elements a lane.
#pragma once

#include <warploom/overlap.cuh>
#include <warploom/variant.cuh>

#include <warploom/append_base.hpp>

namespace warploom {

constexpr int kTeamVector = 8;
constexpr unsigned kWholeWarp = 0xffffffffu;

// Lanes of a team: a power of two, so that exchanges stay inside it.
template <class K>
struct Team {
  using C = typename K::Config;
  static constexpr int kVectors =
      (C::kHeadDimQk > C::kHeadDimV ? C::kHeadDimQk : C::kHeadDimV) / kTeamVector;
  static constexpr int kLanes = kVectors > 16 ? 32 : kVectors > 8 ? 16 : kVectors > 4 ? 8 : 4;
};

// Reductions over the lanes of a vector, in their order; a later one may read the earlier ones.
template <class Seat, class K, class X, int I = 0>
WL_FN void reduce_team(const typename K::Params& p, const TileInfo& tile, int kv_pos, const X& x,
                       int first, float* r) {
  if constexpr (I < Seat::kReductions) {
    float result = Seat::template identity<I>();
    if (first < Seat::kHeadDim) {
#pragma unroll
      for (int i = 0; i < kTeamVector; ++i) {
        const float part = Seat::template reduce<I>(p, tile, kv_pos, first + i, x, r);
        result = Seat::template combine<I>(result, part);
      }
    }
#pragma unroll
    for (int distance = Team<K>::kLanes / 2; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(kWholeWarp, result, distance);
      result = Seat::template combine<I>(result, other);
    }
    r[I] = result;
    reduce_team<Seat, K, X, I + 1>(p, tile, kv_pos, x, first, r);
  }
}

template <class Element>
struct alignas(sizeof(Element) * kTeamVector) TeamVector {
  Element of[kTeamVector];
};

// Appends one vector; all teams of a warp come here together, those without work too.
template <class Seat, class K>
WL_FN void append_vector(const typename K::Params& p, const AppendPlace& place, int row, int head,
                         int lane) {
  using From = typename K::Config::Element;
  using To = typename K::Config::KvElement;
  const int first = lane * kTeamVector;
  const From* from = Seat::from(p, row, head);
  TeamVector<To> made;
  if constexpr (Seat::kActive) {
    const TileInfo tile = tile_of(p, place, head);
    const StoredVector<From> x{from};
    float r[Seat::kReductions + 1];
    reduce_team<Seat, K>(p, tile, place.kv_pos, x, first, r);
    if (first >= Seat::kHeadDim) return;
#pragma unroll
    for (int i = 0; i < kTeamVector; ++i) {
      made.of[i] = from_float<To>(Seat::value(p, tile, place.kv_pos, first + i, x, r));
    }
  } else {
    if (first >= Seat::kHeadDim) return;
    const auto given = *reinterpret_cast<const TeamVector<From>*>(from + first);
#pragma unroll
    for (int i = 0; i < kTeamVector; ++i) made.of[i] = from_float<To>(to_float(given.of[i]));
  }
  if (place.exists) *reinterpret_cast<TeamVector<To>*>(Seat::to(p, place, head) + first) = made;
}

// All new tokens, by all threads of the grid.
template <class K>
WL_FN void run_append(const typename K::Params& p) {
  constexpr int kLanes = Team<K>::kLanes;
  await_earlier_kernels();
  const int rows = min(p.num_rows, p.indptr[p.num_requests]);
  const int vectors = rows * p.num_kv_heads;
  const int teams = gridDim.x * blockDim.x / kLanes;
  const int team = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
  const int in_warp = threadIdx.x % 32 / kLanes;
  for (int first = team - in_warp; first < vectors; first += teams) {
    const int task = min(first + in_warp, vectors - 1);
    const int row = task / p.num_kv_heads, head = task - row * p.num_kv_heads;
    AppendPlace place = place_of(p, row, K::Config::kPageSize);
    place.exists = place.exists && first + in_warp < vectors;
    append_vector<NewKey<K>, K>(p, place, row, head, threadIdx.x % kLanes);
    append_vector<NewValue<K>, K>(p, place, row, head, threadIdx.x % kLanes);
  }
}

}  // namespace warploom
