// What all vector seats say of themselves, wherever their vectors come from.
#pragma once

// For those who define seats, in other headers. Inside of a seat, whose `Variant` and `K` it takes:
// sizes, and how reductions begin and combine.
#define WL_SEAT_TRAITS(seat, Title, dim)                            \
  static constexpr int kReductions = Variant::k##Title##Reductions; \
  static constexpr int kHalves = Variant::k##Title##Halves;         \
  static constexpr int kHeadDim = K::Config::dim;                   \
  template <int I>                                                  \
  WL_FN static float identity() {                                   \
    return Variant::template seat##_identity<I>();                  \
  }                                                                 \
  template <int I>                                                  \
  WL_FN static float combine(float a, float b) {                    \
    return Variant::template seat##_combine<I>(a, b);               \
  }

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
