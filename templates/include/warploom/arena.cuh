// What lies where in the CTA's dynamic shared memory. codegen/tiles.py computes the same size.
#pragma once

#include <warploom/tile.cuh>

namespace warploom {

// While keys are walked:  Q | K stages | V stages | kv_pos of staged keys (column formats only)
//                         | softmax state of each thread, at rest (32 rows per warp only)
// After the walk:         one slab of fp32 rows per warp | their softmax statistics
// Always, at the end:     positions of the rows | what is kept of the item while keys are walked
template <class K>
struct Arena {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Element = typename C::Element;

  // The accumulators need all registers, so the rest of an item waits here.
  struct alignas(16) Kept {
    typename K::WorkItem work;
    typename K::Segment segment;
    const Element* keys;  // token 0 of the item's key head
    const Element* values;
    int index, end;  // of the item, and of the CTA's items
    int is_last;     // this CTA's partial result was the last of its tile
  };

  // 8 floats of padding put the rows that one store touches into different banks.
  static constexpr int kSlabStride = S::kDimV + 8;
  static constexpr int kSlabRows = 16 * C::kWarps;
  static constexpr int kPositionSlots = C::kColumnPositions ? C::kStages + 1 : 0;

  static constexpr int kKeysAt = QueryTile<K>::kBytes;
  static constexpr int kValuesAt = kKeysAt + C::kStages * S::kGroups * KeyTile<K>::kBytes;
  static constexpr int kPositionsAt = kValuesAt + C::kStages * S::kGroups * ValueTile<K>::kBytes;
  static constexpr int kSoftmaxAt = kPositionsAt + kPositionSlots * C::kKeys * 4;
  static constexpr int kWalkBytes = kSoftmaxAt + (S::kRestSoftmax ? 2 * 16 * S::kThreads : 0);
  static constexpr int kStatisticsAt = kSlabRows * kSlabStride * 4;
  static constexpr int kOutputBytes = kStatisticsAt + kSlabRows * 2 * 4;
  static constexpr int kRowsAt =
      round_up(kWalkBytes > kOutputBytes ? kWalkBytes : kOutputBytes, 16);
  static constexpr int kKeptAt = round_up(kRowsAt + C::kRows * int(sizeof(RowInfo)), 16);
  static constexpr int kBytes = kKeptAt + sizeof(Kept);

  char* base;  // aligned to 1024 bytes, as swizzled tiles need

  WL_FN Element* queries() const { return reinterpret_cast<Element*>(base); }
  WL_FN Element* keys(int stage, int group) const {
    return reinterpret_cast<Element*>(base + kKeysAt) +
           (stage * S::kGroups + group) * KeyTile<K>::kElements;
  }
  WL_FN Element* values(int stage, int group) const {
    return reinterpret_cast<Element*>(base + kValuesAt) +
           (stage * S::kGroups + group) * ValueTile<K>::kElements;
  }
  // kv_pos of each key of a staged tile, -1 where there is none.
  WL_FN int* positions(int slot, int group) const {
    return reinterpret_cast<int*>(base + kPositionsAt) + slot * C::kKeys + group * S::kGroupKeys;
  }
  // Four floats of this thread, of two sets.
  WL_FN float4& softmax(int set) const {
    return reinterpret_cast<float4*>(base + kSoftmaxAt)[set * S::kThreads + threadIdx.x];
  }
  WL_FN float* slab_row(int row) const {
    return reinterpret_cast<float*>(base) + row * kSlabStride;
  }
  WL_FN float2& statistics(int row) const {
    return reinterpret_cast<float2*>(base + kStatisticsAt)[row];
  }
  WL_FN RowInfo& row(int r) const { return reinterpret_cast<RowInfo*>(base + kRowsAt)[r]; }
  WL_FN Kept& kept() const { return *reinterpret_cast<Kept*>(base + kKeptAt); }
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
