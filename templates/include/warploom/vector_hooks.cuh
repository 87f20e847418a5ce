// The vector hooks, which see a whole row: query, key, value and output transform.
//
// The threads that copied a row also transform it. They compute all of its new lanes before any is
// written, since a hook may read other lanes than its own (rotary embeddings do).
#pragma once

#include <warploom/item.cuh>

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

// What one instruction loads or stores.
template <int kBytes>
using BytesAtOnce =
    cute::conditional_t<kBytes == 16, uint4, cute::conditional_t<kBytes == 8, uint2, unsigned>>;

// A row of a staged tile, as functors read it. A thread's own lanes come in whole vectors, one of
// each panel, and so do their partners if they are whole vectors too.
template <class Hook, class Tile, class Element, int kPanels, int kPanelLanes, int kLanes = kVector>
class StagedRow {
  static constexpr int kPerHalfword = 2 / int(sizeof(Element));
  static constexpr bool kPairsPanels = partners_are_whole<Hook>(kPanelLanes);
  static constexpr bool kPairsVectors = !kPairsPanels && partners_are_whole<Hook>(kLanes);

 public:
  // `thread` of those that share the row.
  WL_FN void load(const uint16_t* tile, int row, unsigned thread) {
    tile_ = tile;
    row_ = row;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int lane = panel * kPanelLanes + thread * kLanes;
      load_vector(lane, own_[panel]);
      if constexpr (kPairsVectors)
        load_vector(half_partner(lane, 2 * kHalfLanes<Hook>), partners_[panel]);
    }
  }
  WL_FN float own(int lane) const { return to_float(own_[lane / kPanelLanes][lane % kLanes]); }
  WL_FN float pair(int lane) const { return own(lane ^ 1); }
  WL_FN float half(int lane, int width, int head_dim) const {
    const int partner = half_partner(lane, width);
    if constexpr (kPairsPanels) return own(partner);
    if constexpr (kPairsVectors) return to_float(partners_[lane / kPanelLanes][lane % kLanes]);
    return (*this)(clamp_index(partner, head_dim));
  }
  WL_FN float sine(int /*lane*/, float angle) const { return sin(angle); }
  WL_FN float cosine(int /*lane*/, float angle) const { return cos(angle); }
  WL_FN float operator()(int lane) const {
    const uint16_t* unit = tile_ + Tile::offset(row_, lane / kPerHalfword);
    return to_float(reinterpret_cast<const Element*>(unit)[lane % kPerHalfword]);
  }

 private:
  WL_FN void load_vector(int lane, Element (&to)[kLanes]) const {
    using Bytes = BytesAtOnce<sizeof(Element) * kLanes>;
    const uint16_t* from = tile_ + Tile::offset(row_, lane / kPerHalfword);
    const Bytes bytes = *reinterpret_cast<const Bytes*>(from);
    memcpy(to, &bytes, sizeof(bytes));
  }

  const uint16_t* tile_;
  int row_;
  Element own_[kPanels][kLanes];
  Element partners_[kPairsVectors ? kPanels : 1][kLanes];
};

// What a hook keeps of each lane of a thread, for as long as the work item lasts.
template <class Hook, class K, int kLanes = kVector>
struct LaneStates {
  static constexpr int kPanels = round_up(Hook::kHeadDim, Sizes<K>::kBlock) / Sizes<K>::kBlock;
  static constexpr int kRowThreads = Sizes<K>::kBlock / kLanes;
  // Rows of several requests have each their own.
  static constexpr bool kKept = !Hook::kOwnStates;
  typename Hook::Lane of[kKept ? kPanels : 1][kLanes];

  WL_FN LaneStates(const Item<K>& item, unsigned thread) {
    if constexpr (kKept) {
      const auto of_tile = Hook::tile_state(item);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          const int lane = panel * Sizes<K>::kBlock + thread % kRowThreads * kLanes + i;
          of[panel][i] = Hook::lane_state(item, of_tile, lane);
        }
      }
    }
  }
};

// Transforms the rows of a staged tile of `Stored` numbers: in place, or, where those have 8 bits,
// to another tile, all of which is written then. `rows.place(row)` is the hook's position; rows
// that do not exist become or stay zeros, which no functor may change: 0 * NaN is not 0.
//
// Each thread has kBatch rows under way at a time.
template <class Hook, class Tile, class Stored, class NewTile, int kRows, int kThreads, int kBatch,
          int kLanes, class K, class Rows>
class TileTransform {
  using Element = typename K::Config::Element;
  using States = LaneStates<Hook, K, kLanes>;
  static constexpr bool kInPlace = sizeof(Stored) == sizeof(Element);
  static constexpr int kBlock = Sizes<K>::kBlock;
  static constexpr int kRowThreads = States::kRowThreads;
  static constexpr int kRoundRows = kThreads / kRowThreads;
  static constexpr int kPanels = States::kPanels;
  // A tile of few rows leaves threads without one. These look at the last row, since threads of a
  // warp reduce together, and store nothing.
  static constexpr bool kFillsRounds = kRows % (kRoundRows * kBatch) == 0;
  // Rounds are whole swizzle patterns apart.
  static constexpr bool kStepsEvenly = kFillsRounds && kRoundRows % 8 == 0;
  using Bytes = BytesAtOnce<sizeof(Element) * kLanes>;
  struct alignas(Bytes) NewRow {
    Element of[kPanels][kLanes];
  };

 public:
  WL_FN TileTransform(const Item<K>& item, const States& states, unsigned thread, const Rows& rows)
      : item_(item), states_(states), thread_(thread), rows_(rows) {}

  WL_FN void transform(const void* staged, Element* changed) const {
    const auto* units = static_cast<const uint16_t*>(staged);
#pragma unroll 1
    for (int first = 0; first < kRows; first += kRoundRows * kBatch) {
      NewRow made[kBatch];
      make_rows(units, first, made);
      __syncwarp();
#pragma unroll
      for (int b = 0; b < kBatch; ++b) store_row(made[b], changed, first + b * kRoundRows);
    }
  }

 private:
  WL_FN int own_row() const { return thread_ / kRowThreads; }
  WL_FN int row_of(int round_row) const {
    return kFillsRounds ? round_row + own_row() : min(round_row + own_row(), kRows - 1);
  }

  WL_FN void make_rows(const uint16_t* units, int first, NewRow (&made)[kBatch]) const {
    StagedRow<Hook, Tile, Stored, kPanels, kBlock, kLanes> x[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int round_row = first + b * kRoundRows;
      if constexpr (kStepsEvenly) {
        x[b].load(units + round_row * Tile::kWidth, own_row(), thread_ % kRowThreads);
      } else {
        x[b].load(units, row_of(round_row), thread_ % kRowThreads);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      make_row(x[b], rows_.place(row_of(first + b * kRoundRows)), made[b]);
  }

  template <class X, class Place>
  WL_FN void make_row(X& x, const Place& at, NewRow& made) const {
    float r[Hook::kReductions + 1];
    reduce_lanes<Hook, kLanes>(item_, at, x, thread_ % kRowThreads, r);
    const auto of_row = Hook::own_tile_state(item_, at);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int lane = panel * kBlock + thread_ % kRowThreads * kLanes;
      if (lane >= Hook::kHeadDim) continue;
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const auto state = States::kKept ? states_.of[panel][i]
                                         : Hook::own_lane_state(item_, at, of_row, lane + i);
        made.of[panel][i] = from_float<Element>(Hook::value(item_, at, state, lane + i, x, r));
      }
    }
  }

  WL_FN void store_row(const NewRow& made, Element* changed, int round_row) const {
    const int tile_row = round_row + own_row();
    const bool exists = tile_row < kRows && rows_.exists(tile_row);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int lane = panel * kBlock + thread_ % kRowThreads * kLanes;
      const bool is_new = exists && lane < Hook::kHeadDim;
      if (kInPlace ? !is_new : tile_row >= kRows) continue;
      Element* to = kStepsEvenly
                        ? changed + round_row * NewTile::kWidth + NewTile::offset(own_row(), lane)
                        : changed + NewTile::offset(tile_row, lane);
      *reinterpret_cast<Bytes*>(to) =
          is_new ? *reinterpret_cast<const Bytes*>(made.of[panel]) : Bytes{};
    }
  }

  const Item<K>& item_;
  const States& states_;
  unsigned thread_;
  const Rows& rows_;
};

// In place, with what was kept of the lanes.
template <class Hook, class Tile, int kRows, int kThreads, int kBatch = 1, int kLanes, class K,
          class Rows>
WL_FN void transform_rows(const Item<K>& item, const LaneStates<Hook, K, kLanes>& states,
                          typename K::Config::Element* staged, unsigned thread, const Rows& rows) {
  using Element = typename K::Config::Element;
  TileTransform<Hook, Tile, Element, Tile, kRows, kThreads, kBatch, kLanes, K, Rows>(item, states,
                                                                                     thread, rows)
      .transform(staged, staged);
}

// The rows of the query tile, for transform_rows.
template <class K>
struct QueryRows {
  const Item<K>& item;
  WL_FN bool exists(int row) const { return row < item.facts().rows; }
  WL_FN const Row<K>& place(int row) const { return item.row(row); }
};

// The query tile, in place.
template <int kThreads, int kLanes = kVector, class K>
WL_FN void transform_queries(const Item<K>& item, typename K::Config::Element* staged,
                             unsigned thread) {
  const LaneStates<QueryHook<K>, K, kLanes> states(item, thread);
  transform_rows<QueryHook<K>, QueryTile<K>, K::Config::kRows, kThreads>(
      item, states, staged, thread, QueryRows<K>{item});
}

}  // namespace warploom
