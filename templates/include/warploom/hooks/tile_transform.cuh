// Rows of a staged tile through a vector hook.
//
// The threads that copied a row also transform it. They compute all of its new lanes before any is
// written, since a hook may read other lanes than its own (rotary embeddings do).
#pragma once

#include <warploom/hooks/staged_row.cuh>

namespace warploom {

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
