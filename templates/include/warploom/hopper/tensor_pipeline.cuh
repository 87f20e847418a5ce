// The ring of staged tiles of a warp that streams keys (pipeline.cuh), filled by tensor copies: a
// few lanes copy whole blocks, so no thread computes where a key is, and no address goes through
// shared memory.
#pragma once

#include <warploom/hopper/absent.cuh>
#include <warploom/hopper/ptx.cuh>
#include <warploom/staging/pipeline.cuh>

namespace warploom::hopper {

template <class K>
class TensorPipeline : public TileRing<K, TensorPipeline<K>> {
  using Ring = TileRing<K, TensorPipeline>;
  using S = Sizes<K>;
  using C = typename K::Config;
  using Element = typename C::Element;
  using Unit = half_t;
  using Ring::ahead, Ring::find, Ring::ring_, Ring::stage_;
  // A copy brings one block's part of a panel.
  static constexpr int kBoxes = S::kStagingKeys / C::kBlockKv;  // of a tile
  static constexpr int kKeyPanels = S::kDimQk / S::kBlock;
  static constexpr int kPanels = kKeyPanels + S::kDimV / S::kBlock;
  static constexpr int kBoxBytes = C::kBlockKv * S::kBlock * int(sizeof(Element));
  static_assert(S::kSplitKeys && C::kIndexed && !C::kColumnPositions && !S::kNarrowKv);
  static_assert(kBoxes * C::kBlockKv == S::kStagingKeys && C::kBlockKv % 8 == 0,
                "a box begins on a whole swizzle pattern of 8 rows");
  static_assert(kBoxes * kPanels <= kWarpSize, "a lane asks for one box at most");
  static_assert(!Operands<K>::kTransformsKeys && !Operands<K>::kTransformsValues,
                "what tensor copies write, nobody else writes");

 public:
  WL_FN TensorPipeline(const Item<K>& item, int number) : Ring(item, number) {
    // Panels of a block lie side by side in memory, and neighbouring lanes copy them.
    const int panel = lane() % kPanels, box = lane() / kPanels;
    const bool is_key = panel < kKeyPanels;
    column_ = (is_key ? panel : panel - kKeyPanels) * S::kBlock;
    const int place = column_ * S::kStagingKeys + box * C::kBlockKv * S::kBlock;
    to_ = (is_key ? item.arena.keys(0, group()) : item.arena.values(0, group())) + place;
    stage_units_ = S::kStagingGroups * (is_key ? KeyTile<K>::kElements : ValueTile<K>::kElements);
    map_ = is_key ? &item.p.k_once_map : &item.p.v_once_map;
    first_key_ = box < kBoxes ? box * C::kBlockKv : Visit::kNone;
    if (lane() == 0) {
      for (int i = 0; i < C::kStages; ++i) barrier_init(landed(i), 1);
      barrier_init_fence();
    }
  }
  // All copies have landed by now: each tile that was copied had its turn, and places without a
  // tile expect no bytes.
  WL_FN void finish() {
    __syncwarp();
    if (lane() == 0) {
      for (int i = 0; i < C::kStages; ++i) barrier_end(landed(i));
    }
  }

  WL_FN static unsigned group() { return threadIdx.x / kWarpSize; }
  WL_FN static unsigned thread() { return lane(); }

  WL_FN void look_up() {
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) {
      ring_[i] = find();
      blocks_[i] = block_of_box(ring_[i]);
    }
  }
  WL_FN void start() {
#pragma unroll
    for (int i = 0; i + 1 < C::kStages; ++i) copy(i, i);
  }

  WL_FN Columns<K> columns(const Item<K>& item) const { return {item, ring_[0], nullptr}; }

  WL_FN void wait() { barrier_wait(landed(stage_), phase_); }
  WL_FN void copy_ahead() {
    copy(C::kStages - 1, this->stage_before());
    next_ = find();
    next_block_ = block_of_box(next_);
  }
  WL_FN void advance() {
    this->shift(next_);
#pragma unroll
    for (int i = 0; i + 1 < C::kStages; ++i) blocks_[i] = blocks_[i + 1];
    blocks_[C::kStages - 1] = next_block_;
    if (stage_ == 0) phase_ ^= 1;
  }
  // A box brings whatever its block holds behind the last key, and 0 * NaN is not 0.
  WL_FN void clear_absent(const Columns<K>& columns) const {
    if (!columns.may_lack_some()) return;
    hopper::clear_absent<kWarpSize>(columns, this->values());
    fence_async_proxy();  // these writes come before the next tensor copy to the stage
    __syncwarp();
  }

 private:
  WL_FN static unsigned lane() { return threadIdx.x % kWarpSize; }
  WL_FN Barrier* landed(int stage) const {
    auto barriers = reinterpret_cast<Barrier*>(ahead().arena.landed());
    return barriers + group() * C::kStages + stage;
  }

  // The block of the box that this lane copies; -1 if there is none.
  WL_FN int block_of_box(const Visit& visit) const {
    const int end = ahead().facts().places.end;
    if (first_key_ >= end - visit.begin()) return -1;
    const int block = (visit.begin() + first_key_) / C::kBlockKv;
    return __ldg(ahead().p.indices + ahead().facts().index_begin + block);
  }

  // Copies the tile at this place of the ring, of the item that was searched last. If there is no
  // tile, no bytes are expected, and the barrier is passed at once.
  WL_FN void copy(int place, int stage) const {
    const int block = blocks_[place];
    // The bytes are announced before any box is copied. The ballot also guarantees that all lanes
    // have read the tile that this one replaces.
    const int boxes = __popc(__ballot_sync(kAllLanes, block >= 0));
    if (lane() == 0) barrier_arrive_expect(landed(stage), boxes * kBoxBytes);
    __syncwarp();
    if (block < 0) return;
    tma_load_once(map_, landed(stage), to_ + stage * stage_units_, column_, 0,
                  ahead().tile().kv_head, block);
  }

  int phase_ = 0;
  // The box that this lane copies: its place in stage 0, the distance from stage to stage, its
  // column and its first key.
  Unit* to_;
  int stage_units_, column_, first_key_;
  const void* map_;
  Visit next_;                           // the one after those of the ring
  int blocks_[C::kStages], next_block_;  // of the box of this lane
};

}  // namespace warploom::hopper
