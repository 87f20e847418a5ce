// Key and value hooks whose angles grow evenly from key to key (rotary embeddings): the sines of a
// row follow from those of a row before, by the rotation that the angle grew by.
//
// A thread goes down a tile with few lanes, so that their sines stay in registers.
#pragma once

#include <warploom/hooks/tile_transform.cuh>
#include <warploom/items/walk.cuh>

namespace warploom {

// The sine and cosine of an angle.
struct SinCos {
  float cosine, sine;
};
WL_FN SinCos operator+(const SinCos& a, const SinCos& b) {
  return {a.cosine * b.cosine - a.sine * b.sine, a.sine * b.cosine + a.cosine * b.sine};
}
// After equal steps: of the angle after `now`, if `before` was the one before it.
WL_FN SinCos next_sincos(const SinCos& before, const SinCos& now, const SinCos& step) {
  const float twice = 2 * step.cosine;
  return {twice * now.cosine - before.cosine, twice * now.sine - before.sine};
}
WL_FN SinCos sincos_of(float angle) { return {cos(angle), sin(angle)}; }

// To float precision, since a tile's rows add up the error. Taylor's series up to an eighth of a
// circle, and its quarters by exchange.
WL_FN SinCos precise_sincos(float angle) {
  const float n = ::fmaf(angle, 0.63661977f, 12582912.0f) - 12582912.0f;  // as in reduce_angle
  const float x = ::fmaf(-n, -4.371139e-8f, ::fmaf(-n, 1.5707964f, angle));
  const float x2 = x * x;
  const float s =
      x * (1 + x2 * (-1 / 6.0f + x2 * (1 / 120.0f + x2 * (-1 / 5040.0f + x2 * (1 / 362880.0f)))));
  const float c =
      1 + x2 * (-1 / 2.0f + x2 * (1 / 24.0f + x2 * (-1 / 720.0f + x2 * (1 / 40320.0f))));
  const int quarter = int(n) & 3;
  const SinCos eighth = quarter & 1 ? SinCos{-s, c} : SinCos{c, s};
  return quarter & 2 ? SinCos{-eighth.cosine, -eighth.sine} : eighth;
}

// The angle of a hook, if its sines may follow from one another.
template <class Hook>
struct SineRecurrence {
  static constexpr bool kExists = false;
};
#define WL_SINE_RECURRENCE(Name, name, changes_absent)                                       \
  template <class K>                                                                         \
  struct SineRecurrence<Name##Hook<K>> {                                                     \
    using Variant = typename K::Variant;                                                     \
    using Lane = typename Variant::Name##Lane;                                               \
    static constexpr bool kExists = Variant::k##Name##SineRecurrence;                        \
    static constexpr bool kChangesAbsent = changes_absent;                                   \
    static constexpr int kHeadDim = Name##Hook<K>::kHeadDim;                                 \
    WL_FN static constexpr int owner(int lane) {                                             \
      return Variant::name##_angle_lane(lane, kHeadDim);                                     \
    }                                                                                        \
    WL_FN static float angle(const Item<K>& item, int kv_pos, const Lane& state, int lane) { \
      return Variant::name##_angle(item.p, item.tile(), kv_pos, state, lane, kHeadDim);      \
    }                                                                                        \
    WL_FN static float rate(const Item<K>& item, const Lane& state, int lane) {              \
      return Variant::name##_rate(item.p, item.tile(), state, lane, kHeadDim);               \
    }                                                                                        \
  };
// Nobody sees a key that does not exist, but 0 * NaN of such a value would not be 0.
WL_SINE_RECURRENCE(Key, key, true)
WL_SINE_RECURRENCE(Value, value, false)
#undef WL_SINE_RECURRENCE

// Which of a thread's lanes have an angle of their own.
template <class Hook, class K>
struct AngleLanes {
  static constexpr int kLanes = kVector / 2;
  static constexpr int kBlock = Sizes<K>::kBlock;
  static constexpr int kRowThreads = kBlock / kLanes;
  static constexpr int kPanels = round_up(Hook::kHeadDim, kBlock) / kBlock;
  static constexpr int kCount = kPanels * kLanes;

  // The lane of the same thread that `slot` shares its angle with: for all threads the same.
  WL_FN static constexpr int owner(int slot) {
    const int lane = lane_of(slot);
    const int shared = SineRecurrence<Hook>::owner(lane);
    if (shared % kBlock >= kLanes || shared > lane) return slot;
    for (int thread = 1; thread < kRowThreads; ++thread) {
      if (SineRecurrence<Hook>::owner(lane + thread * kLanes) != shared + thread * kLanes)
        return slot;
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

template <class Hook, class K>
WL_FN constexpr bool has_sine_recurrence() {
  using C = typename K::Config;
  if constexpr (SineRecurrence<Hook>::kExists) {
    static_assert(!C::kComposed && !C::kColumnPositions, "as Hopper.has_sine_recurrence says");
    return Hook::kHeadDim % Sizes<K>::kBlock == 0 && C::kKeys % 64 == 0 &&
           AngleLanes<Hook, K>::angles() <= 4;
  }
  return false;
}

// Transforms tiles of keys in place; keeps what is the same for all tiles of a work item.
template <class Hook, class Tile, int kRows, int kThreads, class K>
class RecurrentRows {
  using Lanes = AngleLanes<Hook, K>;
  using Element = typename K::Config::Element;
  static constexpr int kPanels = Lanes::kPanels;
  static constexpr int kLanes = Lanes::kLanes;
  static constexpr int kRowThreads = Lanes::kRowThreads;
  static constexpr int kRoundRows = kThreads / kRowThreads;
  static constexpr int kRun = kRows / kRoundRows % 8 == 0 ? 8 : 4;  // rows from computed sines on
  static constexpr int kBatch = 2;                                  // rows under way at a time
  static_assert(kRoundRows % 8 == 0, "rounds are whole swizzle patterns apart");
  static_assert(kRows % (kRoundRows * kRun) == 0);

  struct SinCosOfLanes {
    SinCos of[Lanes::kCount];
  };
  struct Row : StagedRow<Hook, Tile, Element, kPanels, Lanes::kBlock, kLanes> {
    SinCosOfLanes sincos;
    WL_FN float sine(int lane, float) const { return sincos_of_lane(lane).sine; }
    WL_FN float cosine(int lane, float) const { return sincos_of_lane(lane).cosine; }

   private:
    WL_FN const SinCos& sincos_of_lane(int lane) const {
      return sincos.of[lane / Lanes::kBlock * kLanes + lane % kLanes];
    }
  };
  struct alignas(8) NewRow {
    Element of[kPanels][kLanes];
  };

 public:
  WL_FN RecurrentRows(const Item<K>& item, unsigned thread)
      : item_(item), thread_(thread), states_(item, thread) {
    each_angle(step_, [&](int slot) {
      return precise_sincos(SineRecurrence<Hook>::rate(item, state(slot), lane_of(slot)) *
                            kRoundRows);
    });
  }

  WL_FN void transform(Element* staged, const Columns<K>& columns) const {
#pragma unroll 1
    for (int first = 0; first < kRows; first += kRoundRows * kRun) {
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
  WL_FN static void each_angle(SinCosOfLanes& sincos, const F& f) {
#pragma unroll
    for (int slot = 0; slot < Lanes::kCount; ++slot)
      sincos.of[slot] = Lanes::owner(slot) == slot ? f(slot) : sincos.of[Lanes::owner(slot)];
  }

  // The first row's sines are computed, the second row's rotated, and those after it follow from
  // the two before: cos(x + d) = 2 cos(d) cos(x) - cos(x - d), and sines alike. That is two
  // operations for each angle; its error grows with the square of the rows, of which there are few.
  //
  // Rows are loaded before those ahead of them are stored: this group has one warp of a scheduler.
  WL_FN void transform_run(Element* staged, int kv_pos, int left) const {
    Row x[kRun];
    load_rows(staged, 0, x);
    each_angle(x[0].sincos, [&](int slot) {
      return sincos_of(SineRecurrence<Hook>::angle(item_, kv_pos, state(slot), lane_of(slot)));
    });
    each_angle(x[1].sincos, [&](int slot) { return x[0].sincos.of[slot] + step_.of[slot]; });
#pragma unroll
    for (int first = 0; first < kRun; first += kBatch) {
      load_rows(staged, first + kBatch, x);
      NewRow made[kBatch];
#pragma unroll
      for (int b = first; b < first + kBatch; ++b) {
        if (b >= 2) {
          each_angle(x[b].sincos, [&](int slot) {
            return next_sincos(x[b - 2].sincos.of[slot], x[b - 1].sincos.of[slot], step_.of[slot]);
          });
        }
        make_row(x[b], kv_pos + b * kRoundRows, made[b - first]);
      }
      __syncwarp();  // partners may be another thread's
#pragma unroll
      for (int b = first; b < first + kBatch; ++b) {
        if (SineRecurrence<Hook>::kChangesAbsent || b * kRoundRows < left)
          store_row(made[b - first], staged + b * kRoundRows * Tile::kWidth);
      }
    }
  }

  WL_FN void load_rows(const Element* staged, int first, Row (&x)[kRun]) const {
#pragma unroll
    for (int b = first; b < first + kBatch && b < kRun; ++b) {
      const auto* round = reinterpret_cast<const uint16_t*>(staged) + b * kRoundRows * Tile::kWidth;
      x[b].load(round, own_row(), thread_ % kRowThreads);
    }
  }

  WL_FN void make_row(const Row& x, int kv_pos, NewRow& made) const {
#pragma unroll
    for (int slot = 0; slot < Lanes::kCount; ++slot) {
      made.of[slot / kLanes][slot % kLanes] =
          from_float<Element>(Hook::value(item_, kv_pos, state(slot), lane_of(slot), x, nullptr));
    }
  }

  WL_FN void store_row(const NewRow& made, Element* round) const {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      *reinterpret_cast<uint2*>(round + Tile::offset(own_row(), lane_of(panel * kLanes))) =
          *reinterpret_cast<const uint2*>(made.of[panel]);
    }
  }

  const Item<K>& item_;
  unsigned thread_;
  LaneStates<Hook, K, kLanes> states_;
  SinCosOfLanes step_;  // what angles grow by from round to round
};

}  // namespace warploom
