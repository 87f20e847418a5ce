// How threads share the rows that they transform in place, where registers are few: beside
// accumulators, and in a group that gave most of its own away.
#pragma once

#include <warploom/hopper/shared.cuh>
#include <warploom/tile_transform.cuh>

namespace warploom::hopper {

// Lanes of a panel that a thread transforms. Half a vector in twice the rows is as much work, and
// what is kept of lanes and of a row under way takes half the registers; it pays where the partners
// of lanes take as many again, for wide heads, and where keys and values are transformed or scores
// wait meanwhile. A quarter where more lies beside the accumulators of wide heads: scores, or
// reductions of keys in many panels, or of such as were gathered, for which producers keep more
// registers. Queries wait for no accumulators: half of a vector is little enough for them.
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

// A thread's number of which the compiler knows nothing: what is kept of lanes is then worked out
// where it is constructed, and not once for all items, to lie in registers between.
WL_FN unsigned unknown_thread(unsigned thread) {
  asm volatile("" : "+r"(thread));
  return thread;
}

}  // namespace warploom::hopper
