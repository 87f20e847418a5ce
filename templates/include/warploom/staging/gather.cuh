// Rows from anywhere in global memory to a staged tile, 16 bytes per thread and copy.
//
// The threads that share a row (128 or 64 contiguous bytes at a time) need one address. Where
// addresses come from a list, one thread looks up each row, long before it is copied, and leaves
// the row's offset in shared memory for the others.
#pragma once

#include <warploom/device/ptx.cuh>
#include <warploom/items/item.cuh>
#include <warploom/token_slots.hpp>

namespace warploom {

// Copies kRows rows with kThreads threads. Where the tile's width is that of kHeadDim padded, the
// padding becomes zeros.
template <int kRows, int kHeadDim, int kDim, int kBlock, int kThreads>
struct RowCopy {
  using Tile = SmemTile<kRows, kDim, kBlock>;

  static constexpr int kRowThreads = kBlock / kVector;
  static constexpr int kWarpRows = kWarpSize / kRowThreads;  // rows a warp copies in one round
  static constexpr int kRoundRows = kThreads / kRowThreads;
  static constexpr int kRounds = (kRows + kRoundRows - 1) / kRoundRows;
  static_assert((kRoundRows & (kRoundRows - 1)) == 0,
                "rounds must differ in bits of the row alone");

  WL_FN static int first_row(unsigned thread) { return thread / kRowThreads; }
  WL_FN static int column(unsigned thread) { return thread % kRowThreads * kVector; }

  // Where the rows a warp copies are looked up by its lanes: the row of this thread, may be past
  // the tile, and the lane of this thread's row in a round.
  WL_FN static int looked_up_row(unsigned thread) {
    static_assert(kRounds * kWarpRows <= kWarpSize,
                  "one lane looks up each row that a warp copies");
    const unsigned lane = thread % kWarpSize;
    return lane / kWarpRows * kRoundRows + thread / kWarpSize * kWarpRows + lane % kWarpRows;
  }
  WL_FN static int looking_lane(unsigned thread, int round) {
    return round * kWarpRows + thread % kWarpSize / kRowThreads;
  }

  // Copies this thread's part of its row in a round, or makes it zeros; `from` points to its
  // column. `kOnce` as in copy_vector.
  template <bool kOnce = false, class Element>
  WL_FN static void copy_row(const Element* from, bool row_exists, Element* to, unsigned thread,
                             int round) {
    if (kRounds * kRoundRows > kRows && round * kRoundRows + first_row(thread) >= kRows) return;
    // A swizzled offset is linear over exclusive or, and rows of different rounds share no bits: a
    // step flips some bits within a row, and adds whole rows.
    const int place = Tile::offset(first_row(thread), column(thread));
    const int step = Tile::offset(round * kRoundRows, 0);
    Element* row_to = to + (place ^ step % kBlock) + step / kBlock * kBlock;
#pragma unroll
    for (int panel = 0; panel < kDim / kBlock; ++panel) {
      const int lane = panel * kBlock;
      const bool exists = row_exists && (kHeadDim == kDim || lane + column(thread) < kHeadDim);
      copy_vector<kOnce>(from + lane, row_to + panel * (kRows * kBlock), exists);
    }
  }

  // Copies a tile. rows.offset(round) is where this thread's row of the round begins, relative to
  // `from`, which points to this thread's column; rows.exists(round, offset) says whether there is
  // such a row.
  template <bool kOnce = false, class Element, class Rows>
  WL_FN static void copy(const Element* from, const Rows& rows, Element* to, unsigned thread) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const long long offset = rows.offset(round);
      copy_row<kOnce>(from + offset, rows.exists(round, offset), to, thread, round);
    }
  }
};

// Rows a fixed distance apart, of which the first `count` exist.
template <class Copy>
struct AffineRows {
  long long stride;
  int count, first_row;  // first_row: this thread's in round 0
  WL_FN long long offset(int round) const { return round * (Copy::kRoundRows * stride); }
  WL_FN bool exists(int round, long long /*offset*/) const {
    return first_row + round * Copy::kRoundRows < count;
  }
};

// Offset of a row that does not exist; keeps pointers aligned.
constexpr long long kAbsent = -kVector;

// Rows anywhere: `mine` is the offset of the row this thread looked up for its warp.
template <class Copy>
struct ShuffledRows {
  long long mine;
  unsigned thread;
  WL_FN long long offset(int round) const {
    return __shfl_sync(kAllLanes, mine, Copy::looking_lane(thread, round));
  }
  WL_FN bool exists(int /*round*/, long long offset) const { return offset >= 0; }
};

template <class K>
using QueryCopy = RowCopy<K::Config::kRows, K::Config::kHeadDimQk, Sizes<K>::kDimQk,
                          Sizes<K>::kBlock, Sizes<K>::kThreads>;
template <class K>
using KeyCopy = RowCopy<Sizes<K>::kStagingKeys, K::Config::kHeadDimQk / Sizes<K>::kPerHalfword,
                        Sizes<K>::kHalfwordsQk, Sizes<K>::kKvBlock, Sizes<K>::kStagingThreads>;
template <class K>
using ValueCopy = RowCopy<Sizes<K>::kStagingKeys, K::Config::kHeadDimV / Sizes<K>::kPerHalfword,
                          Sizes<K>::kHalfwordsV, Sizes<K>::kKvBlock, Sizes<K>::kStagingThreads>;

template <class Copy, class K>
WL_FN void copy_queries(const Item<K>& item, typename K::Config::Element* to, unsigned thread) {
  const int row = Copy::looked_up_row(thread);
  const ShuffledRows<Copy> rows{row < item.facts().rows ? item.q_offset(item.row(row)) : kAbsent,
                                thread};
  const auto from = static_cast<const typename K::Config::Element*>(item.p.q);
  Copy::copy(from + Copy::column(thread), rows, to, thread);
}

// The block that holds a place of the segment's list, or -1 behind the keys to walk. Where the
// block lies is `TokenSlots`.
template <class K>
WL_FN int block_of(const Item<K>& item, int place) {
  using C = typename K::Config;
  if (place >= item.facts().places.end) return -1;
  const int block = __ldg(item.p.indices + item.facts().index_begin + place / C::kBlockKv);
  if constexpr (C::kColumnPositions) {
    if (block * C::kBlockKv + place % C::kBlockKv >= item.tile().kv_len) return -1;
  }
  return block;
}

// The position of the key at a place of the list; -1 behind the keys to walk.
template <class K>
WL_FN int listed_position(const Item<K>& item, int place) {
  const int block = block_of(item, place);
  return block < 0 ? -1 : block * K::Config::kBlockKv + place % K::Config::kBlockKv;
}

// Where rows of keys (or values) are: token 0 of the item's head, and how far tokens are apart, in
// halfwords.
struct TokenRows {
  const half_t* first;  // see ItemFacts
  long long block_stride, token_stride;
  WL_FN const half_t* row(int block, int token) const {
    return first + block * block_stride + token * token_stride;
  }
};

// Strides that matter are multiples of 16 bytes.
template <class K>
WL_FN TokenRows key_rows(const Item<K>& item) {
  constexpr int kPerHalfword = Sizes<K>::kPerHalfword;
  return {reinterpret_cast<const half_t*>(item.facts().keys), item.p.k_block_stride / kPerHalfword,
          item.p.k_token_stride / kPerHalfword};
}
template <class K>
WL_FN TokenRows value_rows(const Item<K>& item) {
  constexpr int kPerHalfword = Sizes<K>::kPerHalfword;
  return {reinterpret_cast<const half_t*>(item.facts().values),
          item.p.v_block_stride / kPerHalfword, item.p.v_token_stride / kPerHalfword};
}

}  // namespace warploom
