// How threads share the rows that they transform in place where registers are few: in consumers,
// beside accumulators, and in a warpgroup that gave most of its registers away.
#pragma once

#include <warploom/hooks/tile_transform.cuh>
#include <warploom/hopper/shared.cuh>

namespace warploom::hopper {

// How many lanes of a panel a thread transforms at a time. Half a vector in twice the rows is the
// same work, and needs half the registers for per-lane states and for the row under way. That pays
// where the lanes' partners would take as many registers again, for wide heads, and where both keys
// and values are transformed or scores are in registers meanwhile. A quarter is taken where wide
// heads leave even fewer registers beside their accumulators: scores are in registers, keys are
// reduced over many panels, or keys were gathered, for which producers keep more registers. Queries
// are transformed before there are accumulators: half a vector is always little enough.
template <class Hook, class K>
struct HookLanes {
  static constexpr bool kIsValue = cute::is_same_v<Hook, ValueHook<K>>;
  static constexpr int kPanels = LaneStates<Hook, K>::kPanels;
  static constexpr bool kKeepsPartners =
      Hook::kHalves != 0 && !partners_are_whole<Hook>(Sizes<K>::kBlock);
  using Variant = typename K::Variant;
  static constexpr bool kCrowded = (Variant::kHasKeyTransform && Variant::kHasValueTransform) ||
                                   (kIsValue && !kHasTransformer<K>);
  static constexpr bool kHalvesVectors = kKeepsPartners || kPanels > (kCrowded ? 1 : 3);
  static constexpr bool kIsTight = K::Config::kHeadDimV > 128 && (!K::Config::kBulk || kPanels > 4);
  static constexpr bool kTightKeys = kIsTight && kKeepsPartners && Hook::kReductions > 0;
  static constexpr bool kQuartersVectors = kIsValue ? kPanels > 3 : kTightKeys;
  static constexpr int kCount = kVector / (kQuartersVectors ? 4 : kHalvesVectors ? 2 : 1);
  static constexpr int kOfQueries = kQuartersVectors ? kVector / 2 : kVector;
  using States = LaneStates<Hook, K, kCount>;
};

// Hides a thread's number from the compiler, so that it computes per-lane states where they are
// constructed. Otherwise it would compute them once for all items and hold registers meanwhile.
WL_FN unsigned unknown_thread(unsigned thread) {
  asm volatile("" : "+r"(thread));
  return thread;
}

}  // namespace warploom::hopper
