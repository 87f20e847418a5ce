// The vector hooks: query, key, value and output vectors through the variant, a panel at a time.
#pragma once

#include <warploom/compute/dot_fp32.hpp>
#include <warploom/compute/pack.hpp>
#include <warploom/hook_traits.hpp>
#include <warploom/variant.hpp>

namespace warploom {

// One name for the functions of each hook. `Where` is the hook's position: a row, a kv_pos, or a
// row and its log-sum-exp.
#define WL_HOOK(Name, hook, Title)                                   \
  template <class Variant>                                           \
  struct Name {                                                      \
    static constexpr bool kActive = Variant::kHas##Title##Transform; \
    WL_HOOK_REDUCTIONS(hook, Title)                                  \
    template <int kIndex, class... Where>                            \
    static WL_INLINE float reduce(const Where&... where) {           \
      return Variant::template hook##_reduce<kIndex>(where...);      \
    }                                                                \
    template <class... Where>                                        \
    static WL_INLINE auto tile_state(const Where&... where) {        \
      return Variant::hook##_tile(where...);                         \
    }                                                                \
    template <class... Where>                                        \
    static WL_INLINE auto lane_state(const Where&... where) {        \
      return Variant::hook##_lane(where...);                         \
    }                                                                \
    template <class... Where>                                        \
    static WL_INLINE float value(const Where&... where) {            \
      return Variant::hook(where...);                                \
    }                                                                \
  };

WL_HOOK(QueryHook, query, Query)
WL_HOOK(KeyHook, key, Key)
WL_HOOK(ValueHook, value, Value)
WL_HOOK(OutputHook, output, Output)
#undef WL_HOOK

// The position of vector j, and the facts of the tile or of the row's request: handed to f as the
// arguments of a hook.
struct KeyPlace {
  const int* kv_pos;
  static constexpr bool kPacked = false;
  WL_INLINE TileInfo tile(int /*j*/, const TileInfo& all) const { return all; }
  template <class F>
  WL_INLINE float at(int j, F f) const {
    return f(kv_pos[j]);
  }
};

struct RowPlace {
  const int *q_pos, *q_head, *q_row;
  static constexpr bool kPacked = false;
  WL_INLINE TileInfo tile(int /*j*/, const TileInfo& all) const { return all; }
  template <class F>
  WL_INLINE float at(int j, F f) const {
    return f(RowInfo{q_pos[j], q_head[j], q_row[j]});
  }
};

// Rows of several requests, each with the facts of its own.
struct PackedRowPlace : RowPlace {
  static constexpr bool kPacked = true;
  const TileInfo* tiles;
  WL_INLINE TileInfo tile(int j, const TileInfo& /*all*/) const { return tiles[j]; }
};

template <class Row>
struct OutputPlace {
  static constexpr bool kPacked = Row::kPacked;
  Row row;
  const float* lse;
  WL_INLINE TileInfo tile(int j, const TileInfo& all) const { return row.tile(j, all); }
  template <class F>
  WL_INLINE float at(int j, F f) const {
    return f(RowInfo{row.q_pos[j], row.q_head[j], row.q_row[j]}, lse[j]);
  }
};

template <int kCount>
struct Results {
  float of[max_int(1, kCount)][kPanel];  // of each reduction, for each vector
};

// Reductions over the head in their order; a later one may read the earlier ones.
template <class Hook, int kDim, int kIndex, class Params, class Place>
WL_INLINE void reduce_panel(const Params& p, const TileInfo& tile, const Place& place,
                            const float* __restrict x, Results<Hook::kReductions>& results) {
  if constexpr (kIndex < Hook::kReductions) {
    float* total = results.of[kIndex];
    for (int j = 0; j < kPanel; ++j) total[j] = Hook::template identity<kIndex>();
    for (int lane = 0; lane < kDim; ++lane) {
      for (int j = 0; j < kPanel; ++j) {
        const auto element = [=](int l) WL_LAMBDA_INLINE { return x[l * kPanel + j]; };
        float earlier[kIndex + 1];
        for (int i = 0; i < kIndex; ++i) earlier[i] = results.of[i][j];
        const float value = place.at(j, [&](const auto&... where) WL_LAMBDA_INLINE {
          return Hook::template reduce<kIndex>(p, place.tile(j, tile), where..., lane, kDim,
                                               element, earlier);
        });
        total[j] = Hook::template combine<kIndex>(total[j], value);
      }
    }
    reduce_panel<Hook, kDim, kIndex + 1>(p, tile, place, x, results);
  }
}

// What a hook keeps for a lane: the same for all vectors, unless their requests differ.
template <class Hook, int kDim, class Params, class Place, class State>
WL_INLINE State own_state(const Params& p, const TileInfo& tile, const Place& place, int j,
                          int lane, const State& shared) {
  if constexpr (!Place::kPacked) return shared;
  const TileInfo own = place.tile(j, tile);
  return Hook::lane_state(p, own, Hook::tile_state(p, own), lane, kDim);
}

// y = hook(x) for kPanel vectors side by side: x and y are [kDim][kPanel]. So the loop over vectors
// is the one that becomes vectors, and what depends on the lane alone (a frequency) is computed
// once.
template <class Hook, int kDim, class Params, class Place>
__attribute__((noinline)) void transform_panel(const Params& p, const TileInfo& tile,
                                               const Place place, const float* __restrict x,
                                               float* __restrict y) {
  Results<Hook::kReductions> results;
  reduce_panel<Hook, kDim, 0>(p, tile, place, x, results);
  const auto of_tile = Hook::tile_state(p, tile);
  for (int lane = 0; lane < kDim; ++lane) {
    const auto state = Hook::lane_state(p, tile, of_tile, lane, kDim);
    for (int j = 0; j < kPanel; ++j) {
      const auto element = [=](int l) WL_LAMBDA_INLINE { return x[l * kPanel + j]; };
      float mine[max_int(1, Hook::kReductions)];
      for (int i = 0; i < Hook::kReductions; ++i) mine[i] = results.of[i][j];
      y[lane * kPanel + j] = place.at(j, [&](const auto&... where) WL_LAMBDA_INLINE {
        return Hook::value(p, place.tile(j, tile), where...,
                           own_state<Hook, kDim>(p, tile, place, j, lane, state), lane, kDim,
                           element, mine);
      });
    }
  }
}

// Room for kPanel vectors before and after a transform.
template <int kDim>
struct Stage {
  alignas(64) float before[kDim * kPanel];
  alignas(64) float after[kDim * kPanel];
};

// Transforms kPanel rows from anywhere; `after` is [kDim][kPanel].
template <class Hook, int kDim, class Params, class Place, class Element>
void transform_rows(const Params& p, const TileInfo& tile, const Place& place,
                    const Element* const* rows, float* before, float* after) {
  pack_transposed<DotFp32, kDim>(rows, kPanel, before);
  transform_panel<Hook, kDim>(p, tile, place, before, after);
}

}  // namespace warploom
