// A row of a staged tile in registers, as functors read it.
#pragma once

#include <warploom/hooks/vector_hooks.cuh>

namespace warploom {

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
    static_assert(sizeof(Bytes) == sizeof(Element) * kLanes, "no instruction loads fewer bytes");
    const uint16_t* from = tile_ + Tile::offset(row_, lane / kPerHalfword);
    const Bytes bytes = *reinterpret_cast<const Bytes*>(from);
    memcpy(to, &bytes, sizeof(bytes));
  }

  const uint16_t* tile_;
  int row_;
  Element own_[kPanels][kLanes];
  Element partners_[kPairsVectors ? kPanels : 1][kLanes];
};

}  // namespace warploom
