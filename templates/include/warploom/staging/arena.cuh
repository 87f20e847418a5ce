// What lies where in the CTA's dynamic shared memory, by the table of
// codegen/attention/portable.py.
#pragma once

#include <warploom/device/named_barriers.cuh>
#include <warploom/device/ptx.cuh>
#include <warploom/staging/tile.cuh>

namespace warploom {

// What softmax has found of a row: its largest logit, and the sum of probabilities relative to it
// (of scaled weights a logit that the largest has, ValueScales; only both together mean something).
// As one number, a log-sum-exp, the two could not be kept: beside a logit of 1e9 it has no digits
// left for how many keys are as large.
struct SoftmaxState {
  float largest, sum;
};

template <class K>
class KeyPipeline;

// Whether tensor copies bring the keys that stream, in boxes of what a block has of a tile.
template <class Config>
constexpr bool kInBoxes = Config::SharedMemory::kLandedBytes > 0;

// What everyone must know of the item at hand.
template <class K>
struct alignas(16) ItemFacts {
  using Element = typename K::Config::KvElement;
  TileInfo tile;
  int rows;               // rows of the tile that exist, at least 1
  Range q_pos, q_head;    // of these rows
  Range places;           // keys to walk, hidden ones at both ends: places in the segment's list
  int kv_pos;             // of place 0
  int index_begin;        // first entry of the segment's block list
  int kv_row, kv_block;   // as in Segment
  const Element* keys;    // token 0 of block 0, or of the request if storage is affine
  const Element* values;  // likewise
  int slot, merge;        // as in WorkItem
  int index;              // of the item in the plan
  int is_last;            // this CTA's partial result was the last of its tile
  int sees_all;           // in a composed plan: every row sees all keys of the item
  int ends_list;          // no item of the CTA's list follows it
};

// Staged tiles and the slabs of results that are written after them share their memory. Where warps
// of few rows stream keys from item to item they lie side by side instead, with queries of two
// items, and positions of rows and facts for kItems. One row has another arena (single_arena.cuh).
template <class K, int kRows = K::Config::kRows>
struct Arena {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Element = typename C::Element;
  using O = Operands<K>;
  using At = typename C::SharedMemory;
  using Unit = half_t;  // 16 bits of staged keys or values

  // 8 floats of padding put the rows that one store touches into different banks.
  static constexpr int kSlabStride = S::kDimV + 8;
  static constexpr int kSlabRows = S::kSlabRows * C::kWarps;
  // What was looked up for a tile is needed until the tile has been computed with.
  static constexpr int kSlots = C::kStages + 1;

  // An item is computed, the keys of the next are on their way, and the one after that is opened.
  static constexpr int kItems = S::kSplitKeys ? 4 : 1;
  static constexpr int kQueryTiles = S::kSplitKeys ? 2 : 1;

  static constexpr bool kStagesColumns = false;  // each thread works out its columns' states
  // Rows that are not copied are zeros: keys behind the last visible one cost nothing.
  static constexpr bool kMaskHidesRest = false;
  // Keys come one tile after another: as many loads as possible hide how long each takes.
  static constexpr bool kBranchesAtLoads = false;
  static constexpr bool kKeepsKeys = true;  // numbers of a thread's keys from tile to tile
  // Keys may be those of other requests, too.
  static constexpr bool kReadsOnce = false;
  using Pipeline = KeyPipeline<K>;  // how warps that stream keys get them
  static constexpr int kFactsAt = round_up(C::kRows * int(sizeof(Row<K>)), 16);  // behind rows
  static constexpr int kItemBytes = kFactsAt + sizeof(ItemFacts<K>);
  static constexpr int kBytes = At::kBytes;

  static_assert(At::kQueriesBytes == kQueryTiles * QueryTile<K>::kBytes);
  static_assert(At::kKeysBytes == C::kStages * S::kStagingGroups * KeyTile<K>::kBytes);
  static_assert(At::kValuesBytes == C::kStages * S::kStagingGroups * ValueTile<K>::kBytes);
  static_assert(At::kWideKeysBytes == O::kWidensKeys * S::kStagingGroups * O::WideKeys::kBytes);
  static_assert(At::kWideValuesBytes ==
                O::kWidensValues * S::kStagingGroups * O::WideValues::kBytes);
  // A barrier for each warp and stage, where tensor copies fill them.
  static_assert(At::kLandedBytes == kInBoxes<C> * S::kStagingGroups * C::kStages * 8);
  static_assert(At::kAddressesBytes == (C::kIndexed && !kInBoxes<C>)*kSlots * C::kKeys * 16);
  static_assert(At::kPositionsBytes == C::kColumnPositions * kSlots * C::kKeys * 4);
  static_assert(At::kSlabsBytes == kSlabRows * kSlabStride * 4);
  static_assert(At::kStatisticsBytes == kSlabRows * int(sizeof(SoftmaxState)));
  static_assert(At::kItemsBytes == kItems * kItemBytes);

  char* base;  // aligned to 1024 bytes, as swizzled tiles need
  int index;   // of the item

  // Waits for all threads of the tile: those that compute, and the prefetch warp.
  WL_FN static void sync_all() { named_meet(0, S::kThreads + kWarpSize); }
  // Waits for all threads that compute.
  WL_FN static void sync() {
    if constexpr (S::kSplitKeys) {
      named_sync(kComputingBarrier, S::kThreads);
    } else {
      __syncthreads();
    }
  }

  WL_FN Element* queries() const {
    return reinterpret_cast<Element*>(base + At::kQueries +
                                      index % kQueryTiles * QueryTile<K>::kBytes);
  }
  WL_FN Unit* keys(int stage, int group) const {
    return reinterpret_cast<Unit*>(base + At::kKeys) +
           (stage * S::kStagingGroups + group) * KeyTile<K>::kElements;
  }
  WL_FN Unit* values(int stage, int group) const {
    return reinterpret_cast<Unit*>(base + At::kValues) +
           (stage * S::kStagingGroups + group) * ValueTile<K>::kElements;
  }
  // What transforms make of a staged tile: in its place, unless that is too narrow.
  WL_FN Element* new_keys(int stage, int group) const {
    if constexpr (!O::kWidensKeys) return reinterpret_cast<Element*>(keys(stage, group));
    return reinterpret_cast<Element*>(base + At::kWideKeys) + group * O::WideKeys::kElements;
  }
  WL_FN Element* new_values(int stage, int group) const {
    if constexpr (!O::kWidensValues) return reinterpret_cast<Element*>(values(stage, group));
    return reinterpret_cast<Element*>(base + At::kWideValues) + group * O::WideValues::kElements;
  }
  // Addresses of the rows of a tile's keys (x) and values (y), negative where there is none.
  WL_FN longlong2* addresses(int slot, int group) const {
    return reinterpret_cast<longlong2*>(base + At::kAddresses) + slot * C::kKeys +
           group * S::kStagingKeys;
  }
  WL_FN char* landed() const { return base + At::kLanded; }
  // kv_pos of each key of a staged tile, -1 where there is none.
  WL_FN int* positions(int slot, int group) const {
    return reinterpret_cast<int*>(base + At::kPositions) + slot * C::kKeys +
           group * S::kStagingKeys;
  }
  WL_FN float* slab_row(int row) const {
    return reinterpret_cast<float*>(base + At::kSlabs) + row * kSlabStride;
  }
  WL_FN SoftmaxState& statistics(int row) const {
    return reinterpret_cast<SoftmaxState*>(base + At::kStatistics)[row];
  }
  WL_FN Row<K>& row(int r) const { return reinterpret_cast<Row<K>*>(item())[r]; }
  WL_FN ItemFacts<K>& facts() const { return *reinterpret_cast<ItemFacts<K>*>(item() + kFactsAt); }

 private:
  WL_FN char* item() const { return base + At::kItems + index % kItems * kItemBytes; }
};

// Threads that stage keys together wait for each other.
template <class K>
WL_FN void sync_group() {
  if constexpr (Sizes<K>::kSplitKeys) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

}  // namespace warploom
