// The vector seats: a query, key, value or output row through the variant, a lane at a time.
#pragma once

#include <warploom/simd.hpp>
#include <warploom/variant.hpp>

namespace warploom {

// One name for the functions of each seat. `Where` is the seat's position: a row, a kv_pos, or a row and
// its log-sum-exp.
#define WL_SEAT(Name, seat, Title)                                          \
  template <class Variant>                                                  \
  struct Name {                                                             \
    static constexpr bool kActive = Variant::kHas##Title##Transform;        \
    static constexpr int kReductions = Variant::k##Title##Reductions;       \
    template <int kIndex>                                                   \
    static WL_INLINE float identity() {                                     \
      return Variant::template seat##_identity<kIndex>();                   \
    }                                                                       \
    template <int kIndex>                                                   \
    static WL_INLINE float combine(float a, float b) {                      \
      return Variant::template seat##_combine<kIndex>(a, b);                \
    }                                                                       \
    template <int kIndex, class... Where>                                   \
    static WL_INLINE float reduce(const Where&... where) {                  \
      return Variant::template seat##_reduce<kIndex>(where...);             \
    }                                                                       \
    template <class... Where>                                               \
    static WL_INLINE float value(const Where&... where) {                   \
      return Variant::seat(where...);                                       \
    }                                                                       \
  };

WL_SEAT(QuerySeat, query, Query)
WL_SEAT(KeySeat, key, Key)
WL_SEAT(ValueSeat, value, Value)
WL_SEAT(OutputSeat, output, Output)
#undef WL_SEAT

// Reductions over the head in their order; a later one may read the earlier ones.
template <class Seat, int kDim, int kIndex, class Params, class X, class... Where>
WL_INLINE void reduce_lanes(const Params& p, const TileInfo& tile, const X& x, float* results,
                            const Where&... where) {
  if constexpr (kIndex < Seat::kReductions) {
    constexpr int kParts = 8;  // divides every head_dim
    float part[kParts];
    for (float& value : part) value = Seat::template identity<kIndex>();
    for (int lane = 0; lane < kDim; lane += kParts) {
      for (int i = 0; i < kParts; ++i) {
        const float value =
            Seat::template reduce<kIndex>(p, tile, where..., lane + i, kDim, x, results);
        part[i] = Seat::template combine<kIndex>(part[i], value);
      }
    }
    for (int i = 1; i < kParts; ++i) part[0] = Seat::template combine<kIndex>(part[0], part[i]);
    results[kIndex] = part[0];
    reduce_lanes<Seat, kDim, kIndex + 1>(p, tile, x, results, where...);
  }
}

// y = seat(x); both have kDim numbers and do not overlap.
template <class Seat, int kDim, class Params, class... Where>
void transform(const Params& p, const TileInfo& tile, const float* __restrict x,
               float* __restrict y, const Where&... where) {
  const auto element = [x](int lane) WL_LAMBDA_INLINE { return x[lane]; };
  float results[max_int(1, Seat::kReductions)];
  reduce_lanes<Seat, kDim, 0>(p, tile, element, results, where...);
  for (int lane = 0; lane < kDim; ++lane) {
    y[lane] = Seat::value(p, tile, where..., lane, kDim, element, results);
  }
}

}  // namespace warploom
