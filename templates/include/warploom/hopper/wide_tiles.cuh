// How copied keys and values are changed before Hopper's tensor cores multiply them as staged tiles
// of 16-bit numbers: a hook transforms them, and those of 8 bits are widened.
//
// Tiles of 8 bits land within their widened tile. A row of 128 numbers then fills a row of the
// second of two panels, and in the end rows of both. So the threads that read a row also write it:
// no warp waits for another.
#pragma once

#include <warploom/device/widen.cuh>
#include <warploom/hooks/tile_transform.cuh>

namespace warploom::hopper {

// The type as which tensor cores multiply values.
template <class K>
using ValueElement =
    cute::conditional_t<Operands<K>::kHalfValues, half_t, typename K::Config::Element>;

// A staged tile as it is copied and as it is multiplied; the same tile unless numbers have 8 bits.
template <class WideElement, class HookOfRows, bool kHasHook, class LandedTile, class WideTile>
struct Staging {
  using Element = WideElement;
  using Hook = HookOfRows;
  using Landed = LandedTile;
  using Wide = WideTile;
  static constexpr bool kTransforms = kHasHook;
  static constexpr bool kWidens = !cute::is_same_v<Landed, Wide>;
  static constexpr bool kChanges = kTransforms || kWidens;
  // Where copies go, in 16-bit units from the begin of the wide tile.
  static constexpr int kLandsAt = Wide::kElements - Landed::kElements;
  static_assert(!kWidens || (Wide::kWidth == 64 && Wide::kBytes == 2 * Wide::kPanelBytes &&
                             Landed::kWidth == 64 && Landed::kBytes == Wide::kPanelBytes),
                "a row of 8-bit numbers is one of two panels");
};
template <class K>
using KeyStaging = Staging<typename K::Config::Element, KeyHook<K>, K::Variant::kHasKeyTransform,
                           KeyTile<K>, typename Operands<K>::WideKeys>;
template <class K>
using ValueStaging = Staging<ValueElement<K>, ValueHook<K>, K::Variant::kHasValueTransform,
                             ValueTile<K>, typename Operands<K>::WideValues>;

// Transforms a staged tile by its hook; states of lanes are as for transform_rows.
template <class Of, int kThreads, int kBatch, int kLanes, class K, class Rows>
WL_FN void transform_staged(const Item<K>& item,
                            const LaneStates<typename Of::Hook, K, kLanes>& states,
                            typename K::Config::Element* staged, unsigned thread,
                            const Rows& rows) {
  using C = typename K::Config;
  static_assert(!Of::kWidens || C::kKeys % (kBatch * kThreads * kLanes / Sizes<K>::kBlock) == 0,
                "a thread without a row would read one that others overwrite");
  TileTransform<typename Of::Hook, typename Of::Landed, typename C::KvElement, typename Of::Wide,
                C::kKeys, kThreads, kBatch, kLanes, K, Rows>(item, states, thread, rows)
      .transform(staged + Of::kLandsAt, staged);
}

// For tiles whose rows are all taken to exist.
struct AllRows {
  WL_FN static bool exists(int /*row*/) { return true; }
};

// Widens 8-bit numbers without a hook; each thread takes 16 of a row. Absent rows become zeros.
template <class Of, int kThreads, class C, class Rows>
WL_FN void widen_staged(void* tile, unsigned thread, const Rows& rows) {
  using KvElement = typename C::KvElement;
  using Element = typename Of::Element;
  auto* staged = static_cast<Element*>(tile);
  constexpr int kRowThreads = 8, kRoundRows = kThreads / kRowThreads;
  static_assert(C::kKeys % kRoundRows == 0 && kRoundRows % 8 == 0,
                "rounds are whole swizzle patterns apart");
  const unsigned row = thread / kRowThreads, part = thread % kRowThreads;
  const Element* from = staged + Of::kLandsAt + Of::Landed::offset(row, part * kVector);
  // Threads 4 to 7 have the second panel. They store their vectors the other way round, so that
  // eight threads reach all banks.
  const bool turns = part >= kRowThreads / 2;
  Element* first = staged + Of::Wide::offset(row, 2 * kVector * part + turns * kVector);
  Element* second = staged + Of::Wide::offset(row, 2 * kVector * part + !turns * kVector);
#pragma unroll 2
  for (int begin = 0; begin < C::kKeys; begin += kRoundRows) {
    const int at = begin * Of::Wide::kWidth;
    uint4 bytes = *reinterpret_cast<const uint4*>(from + at);
    if (!rows.exists(begin + row)) bytes = make_uint4(0, 0, 0, 0);
    uint4 low, high;
    widen<KvElement>(bytes.x, Element{}, low.x, low.y);
    widen<KvElement>(bytes.y, Element{}, low.z, low.w);
    widen<KvElement>(bytes.z, Element{}, high.x, high.y);
    widen<KvElement>(bytes.w, Element{}, high.z, high.w);
    __syncwarp();  // all of the row was read
    *reinterpret_cast<uint4*>(first + at) = turns ? high : low;
    *reinterpret_cast<uint4*>(second + at) = turns ? low : high;
  }
}

}  // namespace warploom::hopper
