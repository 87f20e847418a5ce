// Keys and values in memory, and the hooks that transform them vector by vector, outside of
// attention.
#pragma once

#include <warploom/hook_traits.hpp>

namespace warploom {

// One interface for the two hooks.
#define WL_STORED_HOOK(Name, hook, Title, dim)                                                     \
  template <class K>                                                                               \
  struct Name {                                                                                    \
    using Variant = typename K::Variant;                                                           \
    using Params = typename K::Params;                                                             \
    static constexpr bool kActive = Variant::kHas##Title##Transform;                               \
    WL_HOOK_TRAITS(hook, Title, dim)                                                               \
    template <int I, class X>                                                                      \
    WL_FN static float reduce(const Params& p, const TileInfo& tile, int kv_pos, int lane,         \
                              const X& x, const float* r) {                                        \
      return Variant::template hook##_reduce<I>(p, tile, kv_pos, lane, kHeadDim, x, r);            \
    }                                                                                              \
    using Tile = typename Variant::Title##Tile;                                                    \
    using Lane = typename Variant::Title##Lane;                                                    \
    WL_FN static Tile tile_state(const Params& p, const TileInfo& tile) {                          \
      return Variant::hook##_tile(p, tile);                                                        \
    }                                                                                              \
    WL_FN static Lane lane_state(const Params& p, const TileInfo& tile, const Tile& kept,          \
                                 int lane) {                                                       \
      return Variant::hook##_lane(p, tile, kept, lane, kHeadDim);                                  \
    }                                                                                              \
    template <class X>                                                                             \
    WL_FN static float value(const Params& p, const TileInfo& tile, int kv_pos, const Lane& state, \
                             int lane, const X& x, const float* r) {                               \
      return Variant::hook(p, tile, kv_pos, state, lane, kHeadDim, x, r);                          \
    }                                                                                              \
  };

WL_STORED_HOOK(StoredKey, key, Key, kHeadDimQk)
WL_STORED_HOOK(StoredValue, value, Value, kHeadDimV)
#undef WL_STORED_HOOK

// A vector in memory, as functors read it.
template <class Element>
struct StoredVector : LaneByLane<StoredVector<Element>> {
  const Element* from;
  WL_FN explicit StoredVector(const Element* vector) : from(vector) {}
  WL_FN float operator()(int lane) const { return to_float(from[lane]); }
};

}  // namespace warploom
