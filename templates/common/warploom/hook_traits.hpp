// What all vector hooks say of themselves, wherever their vectors come from.
#pragma once

// For those who define hooks, in other headers. Inside of a hook, whose `Variant` it takes: how
// reductions begin and combine.
#define WL_HOOK_REDUCTIONS(hook, Title)                             \
  static constexpr int kReductions = Variant::k##Title##Reductions; \
  template <int I>                                                  \
  WL_FN static float identity() {                                   \
    return Variant::template hook##_identity<I>();                  \
  }                                                                 \
  template <int I>                                                  \
  WL_FN static float combine(float a, float b) {                    \
    return Variant::template hook##_combine<I>(a, b);               \
  }

// The same and its sizes, of a hook that has a `K` too.
#define WL_HOOK_TRAITS(hook, Title, dim)                    \
  WL_HOOK_REDUCTIONS(hook, Title)                           \
  static constexpr int kHalves = Variant::k##Title##Halves; \
  static constexpr int kHeadDim = K::Config::dim;

namespace warploom {

// Half of the lanes that a hook pairs.
template <class Hook>
constexpr int kHalfLanes = (Hook::kHalves < 0 ? Hook::kHeadDim : Hook::kHalves) / 2;

// Whether the partners of `lanes` lanes from a multiple of them on are such lanes again.
template <class Hook>
WL_FN constexpr bool partners_are_whole(int lanes) {
  return 0 < kHalfLanes<Hook> && 2 * kHalfLanes<Hook> <= Hook::kHeadDim &&
         kHalfLanes<Hook> % lanes == 0;
}

}  // namespace warploom
