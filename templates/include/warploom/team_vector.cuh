// Vectors from memory to memory through a hook: a team of lanes for each, 8 elements a lane.
#pragma once

#include <warploom/device/warp.cuh>
#include <warploom/variant.cuh>

#include <warploom/stored_hooks.hpp>

namespace warploom {

constexpr int kTeamVector = 8;

// Lanes of a team: a power of two, so that exchanges stay inside it.
WL_FN constexpr int team_lanes(int head_dim) {
  int lanes = 4;
  while (lanes * kTeamVector < head_dim) lanes *= 2;
  return lanes;
}

template <class Element>
struct alignas(sizeof(Element) * kTeamVector) TeamVector {
  Element of[kTeamVector];
};

template <class Element>
WL_FN void store_vector(Element* to, const TeamVector<Element>& vector) {
  if constexpr (sizeof(vector) == sizeof(uint4)) {
    uint4 words;
    memcpy(&words, &vector, sizeof(words));
    store_words(to, words);
  } else {
    *reinterpret_cast<TeamVector<Element>*>(to) = vector;
  }
}

// A lane of a team. Those behind the vector's end do what its last lane does, and neither count nor
// write: without branches, teams of several vectors share what these have in common.
template <class Hook, int kLanes>
struct TeamLane {
  int first;  // its first element
  bool counts;

  WL_FN explicit TeamLane(int lane)
      : first(min(lane * kTeamVector, Hook::kHeadDim - kTeamVector)),
        counts(kLanes * kTeamVector == Hook::kHeadDim || lane * kTeamVector < Hook::kHeadDim) {}
};

// A vector as functors read it: the lane's own elements and, if these are whole vectors, their
// partners are in registers.
template <class Hook, class Element>
class TeamRow {
  static constexpr bool kPairsVectors = partners_are_whole<Hook>(kTeamVector);

 public:
  WL_FN void load(const Element* from, int first) {
    from_ = from;
    load_vector(from + first, own_);
    if constexpr (kPairsVectors)
      load_vector(from + half_partner(first, 2 * kHalfLanes<Hook>), partners_);
  }
  WL_FN float own(int lane) const { return own_[lane % kTeamVector]; }
  WL_FN float pair(int lane) const { return own(lane ^ 1); }
  WL_FN float half(int lane, int width, int head_dim) const {
    if constexpr (kPairsVectors) return partners_[lane % kTeamVector];
    return (*this)(clamp_index(half_partner(lane, width), head_dim));
  }
  WL_FN float operator()(int lane) const { return to_float(from_[lane]); }

 private:
  // As floats at once: compilers make branches of conversions that only one side of a choice needs.
  WL_FN static void load_vector(const Element* from, float (&to)[kTeamVector]) {
    const auto vector = *reinterpret_cast<const TeamVector<Element>*>(from);
#pragma unroll
    for (int i = 0; i < kTeamVector; ++i) to[i] = to_float(vector.of[i]);
  }

  const Element* from_;
  float own_[kTeamVector];
  float partners_[kTeamVector];
};

// Reductions over the lanes of a vector, in their order; a later one may read the earlier ones.
template <class Hook, int kLanes, class Params, class X, int I = 0>
WL_FN void reduce_team(const Params& p, const TileInfo& tile, int kv_pos, const X& x,
                       const TeamLane<Hook, kLanes>& lane, float* r) {
  if constexpr (I < Hook::kReductions) {
    float result = Hook::template identity<I>();
#pragma unroll
    for (int i = 0; i < kTeamVector; ++i) {
      const float part = Hook::template reduce<I>(p, tile, kv_pos, lane.first + i, x, r);
      result = Hook::template combine<I>(result, part);
    }
    result = lane.counts ? result : Hook::template identity<I>();
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, result, distance);
      result = Hook::template combine<I>(result, other);
    }
    r[I] = result;
    reduce_team<Hook, kLanes, Params, X, I + 1>(p, tile, kv_pos, x, lane, r);
  }
}

// What a hook keeps of each element of a lane.
template <class Hook>
struct TeamStates {
  typename Hook::Lane of[kTeamVector];

  WL_FN TeamStates(const typename Hook::Params& p, const TileInfo& tile, int first) {
    const auto of_tile = Hook::tile_state(p, tile);
#pragma unroll
    for (int i = 0; i < kTeamVector; ++i) of[i] = Hook::lane_state(p, tile, of_tile, first + i);
  }
};

// This lane's part of a new vector; all teams of a warp come here together, since they reduce.
template <class To, class Hook, int kLanes, class Params, class X>
WL_FN TeamVector<To> transformed(const Params& p, const TileInfo& tile, int kv_pos, const X& x,
                                 const TeamLane<Hook, kLanes>& own,
                                 const TeamStates<Hook>& states) {
  TeamVector<To> made;
  float r[Hook::kReductions + 1];
  reduce_team(p, tile, kv_pos, x, own, r);
#pragma unroll
  for (int i = 0; i < kTeamVector; ++i) {
    const int lane = own.first + i;
    made.of[i] = from_float<To>(
        Hook::kActive ? Hook::value(p, tile, kv_pos, states.of[i], lane, x, r) : x.own(lane));
  }
  return made;
}

}  // namespace warploom
