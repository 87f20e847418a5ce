// What all vector seats say of themselves, wherever their vectors come from.
#pragma once

// For those who define seats, in other headers. Inside of a seat, whose `Variant` it takes: how
// reductions begin and combine.
#define WL_SEAT_REDUCTIONS(seat, Title)                             \
  static constexpr int kReductions = Variant::k##Title##Reductions; \
  template <int I>                                                  \
  WL_FN static float identity() {                                   \
    return Variant::template seat##_identity<I>();                  \
  }                                                                 \
  template <int I>                                                  \
  WL_FN static float combine(float a, float b) {                    \
    return Variant::template seat##_combine<I>(a, b);               \
  }

// The same and its sizes, of a seat that has a `K` too.
#define WL_SEAT_TRAITS(seat, Title, dim)                    \
  WL_SEAT_REDUCTIONS(seat, Title)                           \
  static constexpr int kHalves = Variant::k##Title##Halves; \
  static constexpr int kHeadDim = K::Config::dim;

namespace warploom {

// Half of the lanes that a seat pairs.
template <class Seat>
constexpr int kHalfLanes = (Seat::kHalves < 0 ? Seat::kHeadDim : Seat::kHalves) / 2;

// Whether the partners of `lanes` lanes from a multiple of them on are such lanes again.
template <class Seat>
WL_FN constexpr bool partners_are_whole(int lanes) {
  return 0 < kHalfLanes<Seat> && 2 * kHalfLanes<Seat> <= Seat::kHeadDim &&
         kHalfLanes<Seat> % lanes == 0;
}

}  // namespace warploom
