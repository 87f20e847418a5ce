// The cp.async pipeline: a ring of tiles, kStages of keys and values in shared memory.
//
// One synchronisation per tile: it says that tile i has arrived and that everyone has finished with
// tile i - 1, into whose place tile i + kStages - 1 is copied. Tile i + kStages is looked up
// meanwhile.
#pragma once

#include <warploom/walk.cuh>

namespace warploom {

template <class K>
class KeyPipeline {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Element = typename C::Element;
  using Unit = half_t;

 public:
  WL_FN explicit KeyPipeline(const Item<K>& item)
      : item_(item), walk_(item, group()), stage_(0), slot_(0) {}

  WL_FN static unsigned group() { return S::kSplitKeys ? cta_thread() / kWarpSize : 0; }
  WL_FN static unsigned thread() { return S::kSplitKeys ? cta_thread() % kWarpSize : cta_thread(); }

  // Finds the first tiles. Everyone must wait for everyone before start().
  WL_FN void look_up() {
    int blocks[C::kStages];
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) {
      ring_[i] = walk_.next();
      blocks[i] = block_of_row(ring_[i]);
    }
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) publish(ring_[i], blocks[i], i);
  }
  // Starts the first copies. What was copied before without a commit arrives with the first tile.
  WL_FN void start() {
#pragma unroll
    for (int i = 0; i + 1 < C::kStages; ++i) copy(i, i, i);
  }

  WL_FN bool has_tile() const { return ring_[0].begin() < item_.facts().places.end; }
  WL_FN bool is_full() const { return ring_[0].is_full(); }
  WL_FN Unit* keys() const { return item_.arena.keys(stage_, group()); }
  WL_FN Unit* values() const { return item_.arena.values(stage_, group()); }
  WL_FN Element* new_keys() const { return item_.arena.new_keys(stage_, group()); }
  WL_FN Element* new_values() const { return item_.arena.new_values(stage_, group()); }
  WL_FN Columns<K> columns() const {
    return {item_, ring_[0], item_.arena.positions(slot_, group())};
  }

  // A turn: wait, copy_ahead, use keys() and values(), advance.
  WL_FN static void wait() {
    cute::cp_async_wait<C::kStages - 2>();
    sync_group<K>();
  }
  WL_FN void copy_ahead() {
    copy(C::kStages - 1, stage_ == 0 ? C::kStages - 1 : stage_ - 1, slot(C::kStages - 1));
    next_ = walk_.next();
    block_ = block_of_row(next_);
  }
  WL_FN void advance() {
    publish(next_, block_, slot(C::kStages));
#pragma unroll
    for (int i = 0; i + 1 < C::kStages; ++i) ring_[i] = ring_[i + 1];
    ring_[C::kStages - 1] = next_;
    stage_ = stage_ + 1 == C::kStages ? 0 : stage_ + 1;
    slot_ = slot_ == C::kStages ? 0 : slot_ + 1;
  }

 private:
  // threadIdx.x, read anew at each use: addresses that follow from it would otherwise be kept over
  // the loop, in registers that the accumulators need.
  WL_FN static unsigned cta_thread() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
  }

  // Slot of Arena::addresses and Arena::positions of the tile at this place of the ring.
  WL_FN int slot(int place) const {
    const int slot = slot_ + place;
    return slot > C::kStages ? slot - (C::kStages + 1) : slot;
  }

  // One thread for each row of a tile: look-up of its block, and what follows from it for everyone.
  WL_FN int block_of_row(const Visit& visit) const {
    if constexpr (C::kIndexed) {
      if (thread() < S::kGroupKeys) return block_of(item_, visit.begin() + int(thread()));
    }
    return -1;
  }
  WL_FN void publish(const Visit& visit, int block, int slot) const {
    if constexpr (C::kIndexed) {
      if (thread() >= S::kGroupKeys) return;
      const int token = (visit.begin() + int(thread())) % C::kBlockKv;
      const bool exists = block >= 0;
      item_.arena.addresses(slot, group())[thread()] = {
          exists ? reinterpret_cast<long long>(key_rows().row(block, token)) : kAbsent,
          exists ? reinterpret_cast<long long>(value_rows().row(block, token)) : kAbsent};
      if constexpr (C::kColumnPositions) {
        item_.arena.positions(slot, group())[thread()] = exists ? block * C::kBlockKv + token : -1;
      }
    }
  }

  // Where there is no tile, zeros are staged, which nobody reads: without a branch, the
  // instructions of a copy fill the gaps between those of the tensor cores. And waiting counts
  // commits.
  WL_FN void copy(int place, int stage, int slot) const {
    Unit* keys = item_.arena.keys(stage, group());
    Unit* values = item_.arena.values(stage, group());
    if constexpr (C::kIndexed) {
      copy_listed(item_.arena.addresses(slot, group()), keys, values);
    } else {
      copy_affine<KeyCopy<K>>(key_rows(), ring_[place].begin(), keys);
      copy_affine<ValueCopy<K>>(value_rows(), ring_[place].begin(), values);
    }
    cute::cp_async_fence();
  }
  template <class Copy>
  WL_FN void copy_affine(const TokenRows& tokens, int begin, Unit* to) const {
    const int row = Copy::first_row(thread());
    const AffineRows<Copy> rows{tokens.token_stride, item_.facts().places.end - begin, row};
    const Unit* from = tokens.first + Copy::column(thread());
    Copy::copy(from + (begin + row) * tokens.token_stride, rows, to, thread());
  }
  WL_FN void copy_listed(const longlong2* addresses, Unit* keys, Unit* values) const {
    constexpr int kPasses = KeyCopy<K>::kPasses;
    const unsigned me = thread();
    const int first = KeyCopy<K>::first_row(me), column = KeyCopy<K>::column(me);
    longlong2 rows[kPasses];  // read before the first copy: the hardware keeps them in order
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = pass * KeyCopy<K>::kPassRows + first;
      rows[pass] = addresses[min(row, S::kGroupKeys - 1)];
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const auto from = reinterpret_cast<const Unit*>(rows[pass].x) + column;
      KeyCopy<K>::copy_row(from, rows[pass].x >= 0, keys, me, pass);
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const auto from = reinterpret_cast<const Unit*>(rows[pass].y) + column;
      ValueCopy<K>::copy_row(from, rows[pass].y >= 0, values, me, pass);
    }
  }

  // Strides that matter are multiples of 16 bytes.
  WL_FN TokenRows key_rows() const {
    return {reinterpret_cast<const Unit*>(item_.facts().keys),
            item_.p.k_block_stride / S::kPerUnit, item_.p.k_token_stride / S::kPerUnit};
  }
  WL_FN TokenRows value_rows() const {
    return {reinterpret_cast<const Unit*>(item_.facts().values),
            item_.p.v_block_stride / S::kPerUnit, item_.p.v_token_stride / S::kPerUnit};
  }

  const Item<K>& item_;
  KeyWalk<K> walk_;
  int stage_;               // of the tile whose turn it is
  int slot_;                // likewise
  Visit ring_[C::kStages];  // tiles from that one on
  Visit next_;              // the one after these
  int block_;               // looked up for it
};

}  // namespace warploom
