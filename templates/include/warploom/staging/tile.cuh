// Sizes that follow from a rendered `Config`, and where a staged tile's elements lie in shared
// memory.
//
// In all device headers K bundles the types of one rendered kernel: Params, Variant, Config, the
// plan records Segment and WorkItem, and `Arena`, the template of its shared memory.
#pragma once

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>

#include <warploom/device/warp.cuh>
#include <warploom/variant.cuh>

#include <warploom/max_scores.hpp>

namespace warploom {

constexpr int kVector = 8;  // 16-bit elements in 16 bytes, the unit of every copy

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }

// A row of a composed plan's tile, which holds rows of several requests: with the facts of its own.
struct alignas(16) PackedRow : RowInfo {
  int batch, q_len, kv_len, kv_head;
};

template <bool kComposed>
struct RowOf {
  using Type = RowInfo;
};
template <>
struct RowOf<true> {
  using Type = PackedRow;
};
template <class K>
using Row = typename RowOf<K::Config::kComposed>::Type;

// Rows that a slot of partial results has room for: those of its tile, or, where tiles of several
// roles share the slots, of the largest.
template <class Config, class = void>
struct SlotRows {
  static constexpr int kRows = Config::kRows;
};
template <class Config>
struct SlotRows<Config, decltype(void(Config::kSlotRows))> {
  static constexpr int kRows = Config::kSlotRows;
};
template <class Config>
constexpr int kSlotRows = SlotRows<Config>::kRows;

// How the warps of a CTA share a tile. 64 and 128 rows: each warp has its own rows and sees all
// keys. 16 or 8 rows (decoding), or 1: all warps have the same rows and each its own keys, so that
// no warp waits for another before the end of the work item.
template <class K>
struct Sizes {
  using C = typename K::Config;

  static constexpr int kThreads = C::kWarps * kWarpSize;
  static constexpr bool kSingle = C::kRows == 1;  // see single.cuh
  static constexpr bool kSplitKeys = C::kRows <= 16;
  static constexpr bool kTurned = C::kRows == 8;  // rows are columns of products: turned_mma.cuh
  static constexpr int kRowWarps = kSplitKeys ? 1 : C::kWarps;
  static constexpr int kStagingGroups =
      kSplitKeys ? C::kWarps : 1;  // groups of threads that stage keys alone
  static constexpr int kStagingThreads = kThreads / kStagingGroups;
  static constexpr int kStagingKeys = C::kKeys / kStagingGroups;

  // MMA blocks of one warp: 16 rows, 8 keys or 8 lanes of the value. Warp w has rows
  // 16 * (w + kRowWarps * block), so that the diagonal of a causal mask costs all warps the same.
  static constexpr int kRowBlocks = C::kRows / (16 * kRowWarps);
  static constexpr int kSlabRows = kTurned ? 8 : 16;  // of results, that a warp stores at a time
  static constexpr int kKeyBlocks = kStagingKeys / 8;

  // Head dimensions are padded to whole swizzled blocks; the padding is staged as zeros.
  static constexpr int kDimQk = round_up(C::kHeadDimQk, 32);
  static constexpr int kDimV = round_up(C::kHeadDimV, 32);
  static constexpr int kBlock = (kDimQk % 64 == 0 && kDimV % 64 == 0) ? 64 : 32;
  static constexpr int kRowThreads = kBlock / kVector;  // neighbouring threads that share a row

  // Staged keys and values are counted in halfwords (16 bits), of which each holds two 8-bit
  // numbers, so that copies and swizzles are the same.
  using KvElement = typename C::KvElement;
  static constexpr bool kNarrowKv = sizeof(KvElement) == 1;
  static constexpr int kPerHalfword = kNarrowKv ? 2 : 1;
  static constexpr int kHalfwordsQk = kNarrowKv ? round_up(C::kHeadDimQk, 64) / 2 : kDimQk;
  static constexpr int kHalfwordsV = kNarrowKv ? round_up(C::kHeadDimV, 64) / 2 : kDimV;
  static constexpr int kKvBlock = (kHalfwordsQk % 64 == 0 && kHalfwordsV % 64 == 0) ? 64 : 32;

  static_assert(sizeof(typename C::Element) == 2, "the tensor cores are fed with 16-bit floats");
  static_assert(C::kHeadDimQk % 8 == 0 && C::kHeadDimV % 8 == 0,
                "a row must be whole 16-byte vectors, or a copy would cross into the next row");
  static_assert(!kNarrowKv || (C::kHeadDimQk % 16 == 0 && C::kHeadDimV % 16 == 0), "likewise");
  static_assert(C::kHeadDimQk <= 256 && C::kHeadDimV <= 256, "head_dim is at most 256");
  static_assert(kSingle || kTurned || C::kRows % (16 * kRowWarps) == 0,
                "every warp needs whole blocks of 16 rows");
  static_assert(kRowBlocks <= 2, "a warp has at most 32 rows: more accumulators than registers");
  static_assert(kStagingKeys <= kStagingThreads, "a thread looks up one row of a tile");
  static_assert(kStagingKeys % 16 == 0, "every warp needs whole MMA steps of 16 keys");
  static_assert(kSingle || C::kStages >= 2, "one tile is copied while another is used");
};

// kRows rows of kDim elements, as kDim / kBlock panels of kRows x kBlock; in a panel, a row's
// 16-byte vectors are permuted so that any 8 rows at one vector (what ldmatrix reads) lie in
// different banks.
template <int kRows, int kDim, int kBlock>
struct SmemTile {
  using Swizzle = cute::Swizzle<kBlock == 64 ? 3 : 2, 3, 3>;
  using Panels = cute::Layout<
      cute::Shape<cute::Int<kRows>, cute::Shape<cute::Int<kBlock>, cute::Int<kDim / kBlock>>>,
      cute::Stride<cute::Int<kBlock>, cute::Stride<cute::_1, cute::Int<kRows * kBlock>>>>;
  using Layout = decltype(cute::composition(Swizzle{}, Panels{}));

  static constexpr int kWidth = kBlock;  // elements from row to row of a panel
  static constexpr int kElements = kRows * kDim;
  static constexpr int kPanelBytes = 2 * kRows * kBlock;
  static constexpr int kBytes = 2 * kElements;
  static_assert(kRows % 8 == 0 && kDim % kBlock == 0, "a tile is whole swizzled blocks");

  WL_FN static int offset(int row, int lane) { return Layout{}(row, lane); }
};

template <class K>
using QueryTile = SmemTile<K::Config::kRows, Sizes<K>::kDimQk, Sizes<K>::kBlock>;
template <class K>
using KeyTile = SmemTile<Sizes<K>::kStagingKeys, Sizes<K>::kHalfwordsQk, Sizes<K>::kKvBlock>;
template <class K>
using ValueTile = SmemTile<Sizes<K>::kStagingKeys, Sizes<K>::kHalfwordsV, Sizes<K>::kKvBlock>;

// What the tensor cores read: staged tiles as they are, or, of 8-bit numbers that a hook
// transforms, tiles of 16-bit ones; on Hopper of all 8-bit numbers (hopper/wide_tiles.cuh).
template <class K>
struct Operands {
  using S = Sizes<K>;
  using Variant = typename K::Variant;
  static constexpr bool kTransformsKeys = Variant::kHasKeyTransform;
  // Weights take the scales of values where their type has a float's range, and where the softmax's
  // reference can count them, which tells no maxima then. 16-bit values in half precision are
  // transformed: a scale of 2^-12 beside one of 2^12 would be nothing. What scales 8 bits is what
  // their largest number is measured in, so that the smaller weight is the smaller part.
  static constexpr bool kIsHalf = cute::is_same_v<typename K::Config::Element, half_t>;
  static constexpr bool kScalesWeights = Variant::kScalesValues && !kTellsMaxScores<K> &&
                                         (!kIsHalf || (S::kNarrowKv && Variant::kSoftmax));
  static constexpr bool kTransformsValues = Variant::kHasValueTransform && !kScalesWeights;
  // Weights up to 256 and 8-bit values are exact enough in half precision, and widen for less.
  static constexpr bool kHalfValues =
      S::kNarrowKv && !Variant::kHasValueTransform && Variant::kSoftmax;
  static constexpr bool kNarrowKeys = S::kNarrowKv && !kTransformsKeys;
  static constexpr bool kNarrowValues = S::kNarrowKv && !kTransformsValues;
  static constexpr bool kWidensKeys = S::kNarrowKv && kTransformsKeys;
  static constexpr bool kWidensValues = S::kNarrowKv && kTransformsValues;

  using WideKeys = SmemTile<S::kStagingKeys, S::kDimQk, S::kBlock>;
  using WideValues = SmemTile<S::kStagingKeys, S::kDimV, S::kBlock>;
  using Keys = cute::conditional_t<kWidensKeys, WideKeys, KeyTile<K>>;
  using Values = cute::conditional_t<kWidensValues, WideValues, ValueTile<K>>;
  static constexpr int kKeyBlock = kNarrowKeys ? S::kKvBlock : S::kBlock;
  static constexpr int kValueBlock = kNarrowValues ? S::kKvBlock : S::kBlock;
};

}  // namespace warploom
