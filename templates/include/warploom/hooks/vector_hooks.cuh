// The vector hooks, which see a whole row: query, key, value and output transform. What a kernel
// asks of them, and their reductions over lanes.
#pragma once

#include <warploom/items/item.cuh>

#include <warploom/hook_traits.hpp>

namespace warploom {

template <class Row>
struct OutputPlace {
  Row row;
  float lse;  // natural
};

template <class Place>
constexpr bool kIsKey = false;  // a place is a key's position, else a row
template <>
constexpr bool kIsKey<int> = true;

// One interface for the four hooks: kReductions, kHeadDim, reduce, identity, combine, lane_state
// and value.
#define WL_VECTOR_HOOK(Name, name, dim, Place, who, ...)                                         \
  template <class K>                                                                             \
  struct Name##Hook {                                                                            \
    using Variant = typename K::Variant;                                                         \
    WL_HOOK_TRAITS(name, Name, dim)                                                              \
    template <int I, class X>                                                                    \
    WL_FN static float reduce(const Item<K>& item, const Place& at, int lane, const X& x,        \
                              const float* r) {                                                  \
      return Variant::template name##_reduce<I>(item.p, item.tile_of(who), __VA_ARGS__, lane,    \
                                                kHeadDim, x, r);                                 \
    }                                                                                            \
    using Tile = typename Variant::Name##Tile;                                                   \
    using Lane = typename Variant::Name##Lane;                                                   \
    WL_FN static Tile tile_state(const Item<K>& item) {                                          \
      return Variant::name##_tile(item.p, item.tile());                                          \
    }                                                                                            \
    WL_FN static Lane lane_state(const Item<K>& item, const Tile& of_tile, int lane) {           \
      return Variant::name##_lane(item.p, item.tile(), of_tile, lane, kHeadDim);                 \
    }                                                                                            \
    /* What is kept is the same for all vectors, unless their requests differ: then a row's. */  \
    static constexpr bool kOwnStates = K::Config::kComposed && !kIsKey<Place>;                   \
    WL_FN static Tile own_tile_state(const Item<K>& item, const Place& at) {                     \
      return Variant::name##_tile(item.p, item.tile_of(who));                                    \
    }                                                                                            \
    WL_FN static Lane own_lane_state(const Item<K>& item, const Place& at, const Tile& of_tile,  \
                                     int lane) {                                                 \
      return Variant::name##_lane(item.p, item.tile_of(who), of_tile, lane, kHeadDim);           \
    }                                                                                            \
    template <class X>                                                                           \
    WL_FN static float value(const Item<K>& item, const Place& at, const Lane& state, int lane,  \
                             const X& x, const float* r) {                                       \
      return Variant::name(item.p, item.tile_of(who), __VA_ARGS__, state, lane, kHeadDim, x, r); \
    }                                                                                            \
  };

WL_VECTOR_HOOK(Query, query, kHeadDimQk, Row<K>, at, at)
WL_VECTOR_HOOK(Key, key, kHeadDimQk, int, at, at)
WL_VECTOR_HOOK(Value, value, kHeadDimV, int, at, at)
WL_VECTOR_HOOK(Output, output, kHeadDimV, OutputPlace<Row<K>>, at.row, at.row, at.lse)
#undef WL_VECTOR_HOOK

// A row's reductions over lanes, each by all threads of the row; results in r.
template <class Hook, int kLanes = kVector, int I = 0, class K, class Place, class X>
WL_FN void reduce_lanes(const Item<K>& item, const Place& at, X& x, unsigned thread, float* r) {
  if constexpr (I < Hook::kReductions) {
    float result = Hook::template identity<I>();
#pragma unroll
    for (int first = thread * kLanes; first < Hook::kHeadDim; first += Sizes<K>::kBlock) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const float part = Hook::template reduce<I>(item, at, first + i, x, r);
        result = Hook::template combine<I>(result, part);
      }
    }
#pragma unroll
    for (int distance = Sizes<K>::kBlock / kLanes / 2; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, result, distance);
      result = Hook::template combine<I>(result, other);
    }
    r[I] = result;
    reduce_lanes<Hook, kLanes, I + 1>(item, at, x, thread, r);
  }
}

}  // namespace warploom
