// The shared memory of a kernel for one query row (single.cuh).
#pragma once

#include <warploom/staging/arena.cuh>

namespace warploom {

// Two items take turns: the next is opened while the last is written.
template <class K>
struct Arena<K, 1> {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Element = typename C::Element;
  using At = typename C::SharedMemory;

  static constexpr bool kMaskHidesRest = false;

  static constexpr int kItems = 2;
  static constexpr int kSlabStride = S::kDimV;
  static constexpr int kSlabRows = C::kWarps;

  static constexpr int kFactsAt = round_up(int(sizeof(Row<K>)), 16);  // behind the row
  static constexpr int kItemBytes = kFactsAt + sizeof(ItemFacts<K>);
  static constexpr int kBytes = At::kBytes;

  static_assert(At::kQueryBytes == S::kDimQk * int(sizeof(Element)));
  static_assert(At::kSlabsBytes == kSlabRows * kSlabStride * 4);
  static_assert(At::kStatisticsBytes == kSlabRows * int(sizeof(SoftmaxState)));
  static_assert(At::kItemsBytes == kItems * kItemBytes);

  char* base;
  int index;  // of the item

  WL_FN static void sync() { __syncthreads(); }
  WL_FN Element* query() const { return reinterpret_cast<Element*>(base + At::kQuery); }
  WL_FN float* slab_row(int row) const {
    return reinterpret_cast<float*>(base + At::kSlabs) + row * kSlabStride;
  }
  WL_FN SoftmaxState& statistics(int row) const {
    return reinterpret_cast<SoftmaxState*>(base + At::kStatistics)[row];
  }
  WL_FN Row<K>& row(int /*r*/) const { return *reinterpret_cast<Row<K>*>(item()); }
  WL_FN ItemFacts<K>& facts() const { return *reinterpret_cast<ItemFacts<K>*>(item() + kFactsAt); }

 private:
  WL_FN char* item() const { return base + At::kItems + index % kItems * kItemBytes; }
};

}  // namespace warploom
