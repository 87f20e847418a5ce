// The cp.async pipeline: a ring of visits, kStages tiles of keys and of values in flight.
//
// In the turn of tile i, the values of tile i + kStages - 1 are copied once everyone has finished with
// tile i - 1, and the keys of tile i + kStages once everyone has finished with the keys of tile i. So two
// synchronisations per tile order all copies, and with one stage keys and values still alternate. Tile
// i + kStages is looked up a turn before it is copied.
#pragma once

#include <warploom/walk.cuh>

namespace warploom {

template <class K>
class KeyPipeline {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Element = typename C::Element;

 public:
  KeyWalk<K> walk;

  WL_FN explicit KeyPipeline(const Item<K>& item)
      : walk(item, group()),
        item_(item),
        stage_(0) {}

  WL_FN static unsigned group() { return S::kSplitKeys ? threadIdx.x / kWarpSize : 0; }
  WL_FN static unsigned thread() { return S::kSplitKeys ? threadIdx.x % kWarpSize : threadIdx.x; }

  // Starts the first copies. What was copied before without a commit arrives with the first keys.
  WL_FN void fill() {
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) {
      ring_[i] = walk.next(thread());
      copy_keys(ring_[i], i);
      if (i + 1 < C::kStages) copy_values(ring_[i], i);
    }
    ring_[C::kStages] = walk.next(thread());
  }

  WL_FN bool has_tile() const { return ring_[0].begin() < walk.end; }
  WL_FN const Visit& visit() const { return ring_[0]; }
  WL_FN Element* keys() const { return item_.arena.keys(stage_, group()); }
  WL_FN Element* values() const { return item_.arena.values(stage_, group()); }
  WL_FN const int* positions() const { return item_.arena.positions(ring_[0].slot, group()); }
  WL_FN Columns<K> columns() const { return {item_, walk, ring_[0], positions()}; }

  // Waits for the oldest copy of the two that every turn waits for; copies are visible to the group after.
  WL_FN static void wait() {
    cute::cp_async_wait<2 * (C::kStages - 1)>();
    sync_group<K>();
  }
  WL_FN void copy_next_values() {
    copy_values(ring_[C::kStages - 1], stage_ == 0 ? C::kStages - 1 : stage_ - 1);
  }
  WL_FN void copy_next_keys() {
    copy_keys(ring_[C::kStages], stage_);
    incoming_ = walk.next(thread());
  }
  WL_FN void advance() {
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) ring_[i] = ring_[i + 1];
    ring_[C::kStages] = incoming_;
    stage_ = stage_ + 1 == C::kStages ? 0 : stage_ + 1;
  }

 private:
  WL_FN void copy_keys(const Visit& visit, int stage) {
    if (visit.begin() < walk.end) {
      copy_tokens<K, KeyCopy<K>>(item_.arena.kept().keys, item_.p.k_block_stride,
                                 item_.p.k_token_stride, visit.begin(), walk.end, visit.block,
                                 item_.arena.keys(stage, group()), thread());
      if constexpr (C::kColumnPositions) write_positions(visit);
    }
    cute::cp_async_fence();  // also without a tile: waiting counts commits
  }
  WL_FN void copy_values(const Visit& visit, int stage) {
    if (visit.begin() < walk.end) {
      copy_tokens<K, ValueCopy<K>>(item_.arena.kept().values, item_.p.v_block_stride,
                                   item_.p.v_token_stride, visit.begin(), walk.end, visit.block,
                                   item_.arena.values(stage, group()), thread());
    }
    cute::cp_async_fence();
  }
  WL_FN void write_positions(const Visit& visit) {
    const int key = KeyCopy<K>::looked_up_row(thread());
    if (key >= S::kGroupKeys) return;
    const int position = visit.block * C::kBlockKv + (visit.begin() + key) % C::kBlockKv;
    item_.arena.positions(visit.slot, group())[key] = visit.block < 0 ? -1 : position;
  }

  const Item<K>& item_;
  int stage_;  // of the tile whose turn it is
  Visit ring_[C::kStages + 1];
  Visit incoming_;
};

}  // namespace warploom
