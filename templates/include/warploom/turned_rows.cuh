// Key and value seats whose angles grow evenly from key to key (rotary embeddings): the sines of a
// row are those of a row before, turned by what the angle grew.
//
// A thread goes down a tile with few lanes, so that their sines stay in registers.
#pragma once

#include <warploom/vector_seats.cuh>
#include <warploom/walk.cuh>

namespace warploom {

// The direction of an angle.
struct Turn {
  float cosine, sine;
};
WL_FN Turn operator+(const Turn& a, const Turn& b) {
  return {a.cosine * b.cosine - a.sine * b.sine, a.sine * b.cosine + a.cosine * b.sine};
}
// After equal steps: the turn after `now`, if `before` was the one before it.
WL_FN Turn next_turn(const Turn& before, const Turn& now, const Turn& step) {
  const float twice = 2 * step.cosine;
  return {twice * now.cosine - before.cosine, twice * now.sine - before.sine};
}
WL_FN Turn turn_of(float angle) { return {cos(angle), sin(angle)}; }

// To float precision, since a tile's rows add up the error. Taylor's series up to an eighth of a
// circle, and its quarters by exchange.
WL_FN Turn precise_turn_of(float angle) {
  const float n = ::fmaf(angle, 0.63661977f, 12582912.0f) - 12582912.0f;  // as in reduce_angle
  const float x = ::fmaf(-n, -4.371139e-8f, ::fmaf(-n, 1.5707964f, angle));
  const float x2 = x * x;
  const float s =
      x * (1 + x2 * (-1 / 6.0f + x2 * (1 / 120.0f + x2 * (-1 / 5040.0f + x2 * (1 / 362880.0f)))));
  const float c =
      1 + x2 * (-1 / 2.0f + x2 * (1 / 24.0f + x2 * (-1 / 720.0f + x2 * (1 / 40320.0f))));
  const int quarter = int(n) & 3;
  const Turn eighth = quarter & 1 ? Turn{-s, c} : Turn{c, s};
  return quarter & 2 ? Turn{-eighth.cosine, -eighth.sine} : eighth;
}

// The seats that may turn, each by its angle.
template <class Seat>
struct Turning {
  static constexpr bool kTurns = false;
};
#define WL_TURNING_SEAT(Name, name, changes_absent)                                          \
  template <class K>                                                                         \
  struct Turning<Name##Seat<K>> {                                                            \
    using Variant = typename K::Variant;                                                     \
    using Lane = typename Variant::Name##Lane;                                               \
    static constexpr bool kTurns = Variant::k##Name##Turns;                                  \
    static constexpr bool kChangesAbsent = changes_absent;                                   \
    static constexpr int kHeadDim = Name##Seat<K>::kHeadDim;                                 \
    WL_FN static constexpr int owner(int lane) {                                             \
      return Variant::name##_turn_lane(lane, kHeadDim);                                      \
    }                                                                                        \
    WL_FN static float angle(const Item<K>& item, int kv_pos, const Lane& state, int lane) { \
      return Variant::name##_angle(item.p, item.tile(), kv_pos, state, lane, kHeadDim);      \
    }                                                                                        \
    WL_FN static float rate(const Item<K>& item, const Lane& state, int lane) {              \
      return Variant::name##_rate(item.p, item.tile(), state, lane, kHeadDim);               \
    }                                                                                        \
  };
// Nobody sees a key that does not exist, but 0 * NaN of such a value would not be 0.
WL_TURNING_SEAT(Key, key, true)
WL_TURNING_SEAT(Value, value, false)
#undef WL_TURNING_SEAT

// Which of a thread's lanes turn by an angle of their own.
template <class Seat, class K>
struct TurningLanes {
  static constexpr int kLanes = kVector / 2;
  static constexpr int kBlock = Sizes<K>::kBlock;
  static constexpr int kRowThreads = kBlock / kLanes;
  static constexpr int kPanels = round_up(Seat::kHeadDim, kBlock) / kBlock;
  static constexpr int kCount = kPanels * kLanes;

  // The lane of the same thread that `slot` shares its angle with: for all threads the same.
  WL_FN static constexpr int owner(int slot) {
    const int lane = lane_of(slot);
    const int shared = Turning<Seat>::owner(lane);
    if (shared % kBlock >= kLanes || shared > lane) return slot;
    for (int thread = 1; thread < kRowThreads; ++thread) {
      if (Turning<Seat>::owner(lane + thread * kLanes) != shared + thread * kLanes) return slot;
    }
    return shared / kBlock * kLanes + shared % kBlock;
  }
  WL_FN static constexpr int lane_of(int slot) { return slot / kLanes * kBlock + slot % kLanes; }
  WL_FN static constexpr int angles() {
    int count = 0;
    for (int slot = 0; slot < kCount; ++slot) count += owner(slot) == slot;
    return count;
  }
};

template <class Seat, class K>
WL_FN constexpr bool has_turned_rows() {
  using C = typename K::Config;
  if constexpr (Turning<Seat>::kTurns) {
    static_assert(!C::kComposed && !C::kColumnPositions, "as Hopper.turns_rows says");
    return Seat::kHeadDim % Sizes<K>::kBlock == 0 && C::kKeys % 64 == 0 &&
           TurningLanes<Seat, K>::angles() <= 4;
  }
  return false;
}

// Transforms tiles of keys in place; keeps what is the same for all tiles of a work item.
template <class Seat, class Tile, int kRows, int kThreads, class K>
class TurnedRows {
  using Lanes = TurningLanes<Seat, K>;
  using Element = typename K::Config::Element;
  static constexpr int kPanels = Lanes::kPanels;
  static constexpr int kLanes = Lanes::kLanes;
  static constexpr int kRowThreads = Lanes::kRowThreads;
  static constexpr int kPassRows = kThreads / kRowThreads;
  static constexpr int kRun = kRows / kPassRows % 8 == 0 ? 8 : 4;  // rows from computed sines on
  static constexpr int kBatch = 2;                                 // rows under way at a time
  static_assert(kPassRows % 8 == 0, "passes are whole swizzle patterns apart");
  static_assert(kRows % (kPassRows * kRun) == 0);

  struct Turns {
    Turn of[Lanes::kCount];
  };
  struct Row : StagedRow<Seat, Tile, Element, kPanels, Lanes::kBlock, kLanes> {
    Turns turns;
    WL_FN float sine(int lane, float) const { return turn(lane).sine; }
    WL_FN float cosine(int lane, float) const { return turn(lane).cosine; }

   private:
    WL_FN const Turn& turn(int lane) const {
      return turns.of[lane / Lanes::kBlock * kLanes + lane % kLanes];
    }
  };
  struct alignas(8) NewRow {
    Element of[kPanels][kLanes];
  };

 public:
  WL_FN TurnedRows(const Item<K>& item, unsigned thread)
      : item_(item), thread_(thread), states_(item, thread) {
    each_turn(pass_, [&](int slot) {
      return precise_turn_of(Turning<Seat>::rate(item, state(slot), lane_of(slot)) * kPassRows);
    });
  }

  WL_FN void transform(Element* staged, const Columns<K>& columns) const {
#pragma unroll 1
    for (int first = 0; first < kRows; first += kPassRows * kRun) {
      transform_run(staged + first * Tile::kWidth, columns.place(first + own_row()),
                    columns.count - first - own_row());
    }
  }

 private:
  WL_FN int own_row() const { return thread_ / kRowThreads; }
  WL_FN int lane_of(int slot) const {
    return Lanes::lane_of(slot) + thread_ % kRowThreads * kLanes;
  }
  WL_FN const auto& state(int slot) const { return states_.of[slot / kLanes][slot % kLanes]; }

  // Those of lanes that share an angle are computed once.
  template <class F>
  WL_FN static void each_turn(Turns& turns, const F& f) {
#pragma unroll
    for (int slot = 0; slot < Lanes::kCount; ++slot)
      turns.of[slot] = Lanes::owner(slot) == slot ? f(slot) : turns.of[Lanes::owner(slot)];
  }

  // The first row's sines are computed, the second row's turned, and those after it follow from
  // the two before: cos(x + d) = 2 cos(d) cos(x) - cos(x - d), and sines alike. That is two
  // operations for each angle; its error grows with the square of the rows, of which there are few.
  //
  // Rows are loaded before those ahead of them are stored: this group has one warp of a scheduler.
  WL_FN void transform_run(Element* staged, int kv_pos, int left) const {
    Row x[kRun];
    load_rows(staged, 0, x);
    each_turn(x[0].turns, [&](int slot) {
      return turn_of(Turning<Seat>::angle(item_, kv_pos, state(slot), lane_of(slot)));
    });
    each_turn(x[1].turns, [&](int slot) { return x[0].turns.of[slot] + pass_.of[slot]; });
#pragma unroll
    for (int first = 0; first < kRun; first += kBatch) {
      load_rows(staged, first + kBatch, x);
      NewRow made[kBatch];
#pragma unroll
      for (int b = first; b < first + kBatch; ++b) {
        if (b >= 2) {
          each_turn(x[b].turns, [&](int slot) {
            return next_turn(x[b - 2].turns.of[slot], x[b - 1].turns.of[slot], pass_.of[slot]);
          });
        }
        make_row(x[b], kv_pos + b * kPassRows, made[b - first]);
      }
      __syncwarp();  // partners may be another thread's
#pragma unroll
      for (int b = first; b < first + kBatch; ++b) {
        if (Turning<Seat>::kChangesAbsent || b * kPassRows < left)
          store_row(made[b - first], staged + b * kPassRows * Tile::kWidth);
      }
    }
  }

  WL_FN void load_rows(const Element* staged, int first, Row (&x)[kRun]) const {
#pragma unroll
    for (int b = first; b < first + kBatch && b < kRun; ++b) {
      const auto* pass = reinterpret_cast<const uint16_t*>(staged) + b * kPassRows * Tile::kWidth;
      x[b].load(pass, own_row(), thread_ % kRowThreads);
    }
  }

  WL_FN void make_row(const Row& x, int kv_pos, NewRow& made) const {
#pragma unroll
    for (int slot = 0; slot < Lanes::kCount; ++slot) {
      made.of[slot / kLanes][slot % kLanes] =
          from_float<Element>(Seat::value(item_, kv_pos, state(slot), lane_of(slot), x, nullptr));
    }
  }

  WL_FN void store_row(const NewRow& made, Element* pass) const {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      *reinterpret_cast<uint2*>(pass + Tile::offset(own_row(), lane_of(panel * kLanes))) =
          *reinterpret_cast<const uint2*>(made.of[panel]);
    }
  }

  const Item<K>& item_;
  unsigned thread_;
  LaneStates<Seat, K, kLanes> states_;
  Turns pass_;  // what rows turn by from pass to pass
};

}  // namespace warploom
