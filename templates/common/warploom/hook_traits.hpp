// Traits that all vector hooks have, wherever their vectors come from.
#pragma once

// For headers that define hooks; used inside a hook class, which has a `Variant`: how its
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

// The same, and the hook's sizes; the hook class has a `K`, too.
#define WL_HOOK_TRAITS(hook, Title, dim)                    \
  WL_HOOK_REDUCTIONS(hook, Title)                           \
  static constexpr int kHalves = Variant::k##Title##Halves; \
  static constexpr int kHeadDim = K::Config::dim;

namespace warploom {

// Half of the lanes that a hook pairs.
template <class Hook>
constexpr int kHalfLanes = (Hook::kHalves < 0 ? Hook::kHeadDim : Hook::kHalves) / 2;

// Whether the partners of an aligned block of `lanes` lanes are an aligned block, too.
template <class Hook>
WL_FN constexpr bool partners_are_whole(int lanes) {
  return 0 < kHalfLanes<Hook> && 2 * kHalfLanes<Hook> <= Hook::kHeadDim &&
         kHalfLanes<Hook> % lanes == 0;
}

}  // namespace warploom
