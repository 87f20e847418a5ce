// The vector seats, which see a whole row: query, key, value and output transform.
//
// The threads that copied a row also transform it. They compute all of its new lanes before any is
// written, since a seat may read other lanes than its own (rotary embeddings do).
#pragma once

#include <warploom/item.cuh>

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

// One interface for the four seats: kReductions, kHeadDim, reduce, identity, combine, lane_state
// and value.
#define WL_VECTOR_SEAT(Name, name, dim, Place, who, ...)                                         \
  template <class K>                                                                             \
  struct Name##Seat {                                                                            \
    using Variant = typename K::Variant;                                                         \
    static constexpr int kReductions = Variant::k##Name##Reductions;                             \
    static constexpr int kHeadDim = K::Config::dim;                                              \
    template <int I>                                                                             \
    WL_FN static float identity() {                                                              \
      return Variant::template name##_identity<I>();                                             \
    }                                                                                            \
    template <int I>                                                                             \
    WL_FN static float combine(float a, float b) {                                               \
      return Variant::template name##_combine<I>(a, b);                                          \
    }                                                                                            \
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

WL_VECTOR_SEAT(Query, query, kHeadDimQk, Row<K>, at, at)
WL_VECTOR_SEAT(Key, key, kHeadDimQk, int, at, at)
WL_VECTOR_SEAT(Value, value, kHeadDimV, int, at, at)
WL_VECTOR_SEAT(Output, output, kHeadDimV, OutputPlace<Row<K>>, at.row, at.row, at.lse)
#undef WL_VECTOR_SEAT

// A row's reductions over lanes, each by all threads of the row; results in r.
template <class Seat, class K, class Place, class X, int I = 0>
WL_FN void reduce_lanes(const Item<K>& item, const Place& at, const X& x, unsigned thread,
                        float* r) {
  if constexpr (I < Seat::kReductions) {
    float result = Seat::template identity<I>();
#pragma unroll
    for (int first = thread * kVector; first < Seat::kHeadDim; first += Sizes<K>::kBlock) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float part = Seat::template reduce<I>(item, at, first + i, x, r);
        result = Seat::template combine<I>(result, part);
      }
    }
#pragma unroll
    for (int distance = Sizes<K>::kRowThreads / 2; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, result, distance);
      result = Seat::template combine<I>(result, other);
    }
    r[I] = result;
    reduce_lanes<Seat, K, Place, X, I + 1>(item, at, x, thread, r);
  }
}

// A row of a staged tile, as functors read it.
template <class Tile, class Element>
struct StagedRow {
  const void* tile;
  int row;
  WL_FN float operator()(int lane) const {
    constexpr int kPerUnit = 2 / int(sizeof(Element));
    const int place = kPerUnit * Tile::offset(row, lane / kPerUnit) + lane % kPerUnit;
    return to_float(static_cast<const Element*>(tile)[place]);
  }
};

// Transforms the rows of a staged tile of `Stored` numbers: in place, or, where those have 8 bits,
// to another tile, all of which is written then. `rows.place(row)` is the seat's position; rows
// that do not exist become or stay zeros, which no functor may change: 0 * NaN is not 0.
template <class Seat, class Tile, class Stored, class NewTile, int kRows, int kThreads, class K,
          class Rows>
WL_FN void transform_tile(const Item<K>& item, const void* staged,
                          typename K::Config::Element* changed_tile, unsigned thread,
                          const Rows& rows) {
  using Element = typename K::Config::Element;
  constexpr bool kInPlace = sizeof(Stored) == sizeof(Element);
  constexpr int kRowThreads = Sizes<K>::kRowThreads;
  constexpr int kPanels = NewTile::kElements / kRows / Sizes<K>::kBlock;
  const int column = thread % kRowThreads * kVector;
  const auto of_tile = Seat::tile_state(item);  // unless rows have their own
  typename Seat::Lane states[kPanels][kVector];
#pragma unroll
  for (int panel = 0; !Seat::kOwnStates && panel < kPanels; ++panel) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      states[panel][i] = Seat::lane_state(item, of_tile, panel * Sizes<K>::kBlock + column + i);
    }
  }
  for (int first = 0; first < kRows; first += kThreads / kRowThreads) {
    const int tile_row = first + thread / kRowThreads;
    const bool exists = tile_row < kRows && rows.exists(tile_row);
    // All threads of a warp take part in reductions. Each stays at its own row: what another row's
    // threads write must not be read, not even in vain.
    const int row = min(tile_row, kRows - 1);
    const auto at = rows.place(row);
    const StagedRow<Tile, Stored> x{staged, row};
    float r[Seat::kReductions + 1];
    reduce_lanes<Seat>(item, at, x, thread % kRowThreads, r);
    const auto of_row = Seat::own_tile_state(item, at);
    alignas(16) Element changed[kPanels][kVector] = {};
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int lane = panel * Sizes<K>::kBlock + column;
      if (lane >= Seat::kHeadDim) continue;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const auto state =
            Seat::kOwnStates ? Seat::own_lane_state(item, at, of_row, lane + i) : states[panel][i];
        changed[panel][i] = from_float<Element>(Seat::value(item, at, state, lane + i, x, r));
      }
    }
    __syncwarp();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int lane = panel * Sizes<K>::kBlock + column;
      const bool is_new = exists && lane < Seat::kHeadDim;
      if (kInPlace ? !is_new : tile_row >= kRows) continue;
      *reinterpret_cast<uint4*>(changed_tile + NewTile::offset(row, lane)) =
          is_new ? *reinterpret_cast<const uint4*>(changed[panel]) : uint4{};
    }
  }
}

// In place.
template <class Seat, class Tile, int kRows, int kThreads, class K, class Rows>
WL_FN void transform_rows(const Item<K>& item, typename K::Config::Element* staged, unsigned thread,
                          const Rows& rows) {
  transform_tile<Seat, Tile, typename K::Config::Element, Tile, kRows, kThreads>(
      item, staged, staged, thread, rows);
}

// The rows of the query tile, for transform_rows.
template <class K>
struct QueryRows {
  const Item<K>& item;
  WL_FN bool exists(int row) const { return row < item.facts().rows; }
  WL_FN const Row<K>& place(int row) const { return item.row(row); }
};

}  // namespace warploom
