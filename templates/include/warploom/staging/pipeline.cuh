// The cp.async pipeline: a ring of tiles, kStages of keys and values in shared memory.
//
// One synchronisation per tile: it says that tile i has arrived and that everyone has finished with
// tile i - 1, into whose place tile i + kStages - 1 is copied. Tile i + kStages is looked up
// meanwhile.
#pragma once

#include <warploom/staging/tile_ring.cuh>

namespace warploom {

template <class K>
class KeyPipeline : public TileRing<K, KeyPipeline<K>> {
  using Ring = TileRing<K, KeyPipeline>;
  using S = Sizes<K>;
  using C = typename K::Config;
  using Unit = half_t;
  using Ring::ahead, Ring::find, Ring::ring_, Ring::stage_;
  static constexpr bool kOnce = K::template Arena<K>::kReadsOnce;

 public:
  WL_FN KeyPipeline(const Item<K>& item, int number) : Ring(item, number), slot_(0) {}

  WL_FN static unsigned group() { return S::kSplitKeys ? cta_thread() / kWarpSize : 0; }
  WL_FN static unsigned thread() { return S::kSplitKeys ? cta_thread() % kWarpSize : cta_thread(); }

  // Finds the first tiles. Everyone must wait for everyone before start().
  WL_FN void look_up() {
    int blocks[C::kStages];
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) {
      ring_[i] = find();
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

  WL_FN Columns<K> columns(const Item<K>& item) const {
    return {item, ring_[0], item.arena.positions(slot_, group())};
  }

  // After the last item.
  WL_FN static void finish() { cute::cp_async_wait<0>(); }
  // Absent rows are copied as zeros.
  WL_FN static void clear_absent(const Columns<K>& /*columns*/) {}

  // A turn: wait, copy_ahead, use keys() and values(), advance.
  WL_FN static void wait() {
    cute::cp_async_wait<C::kStages - 2>();
    sync_group<K>();
  }
  WL_FN void copy_ahead() {
    copy(C::kStages - 1, this->stage_before(), slot(C::kStages - 1));
    next_ = find();
    block_ = block_of_row(next_);
  }
  WL_FN void advance() {
    publish(next_, block_, slot(C::kStages));
    this->shift(next_);
    slot_ = slot_ == C::kStages ? 0 : slot_ + 1;
  }

 private:
  // Slot of Arena::addresses and Arena::positions of the tile at this place of the ring.
  WL_FN int slot(int place) const {
    const int slot = slot_ + place;
    return slot > C::kStages ? slot - (C::kStages + 1) : slot;
  }

  // One thread for each row of a tile: look-up of its block, and what follows from it for everyone.
  WL_FN int block_of_row(const Visit& visit) const {
    if constexpr (C::kIndexed) {
      if (thread() < S::kStagingKeys) return block_of(ahead(), visit.begin() + int(thread()));
    }
    return -1;
  }
  WL_FN void publish(const Visit& visit, int block, int slot) const {
    if constexpr (C::kIndexed) {
      if (thread() >= S::kStagingKeys) return;
      const int token = (visit.begin() + int(thread())) % C::kBlockKv;
      const bool exists = block >= 0;
      const int at = TokenSlots<C>::of(block);
      ahead().arena.addresses(slot, group())[thread()] = {
          exists ? reinterpret_cast<long long>(key_rows(ahead()).row(at, token)) : kAbsent,
          exists ? reinterpret_cast<long long>(value_rows(ahead()).row(at, token)) : kAbsent};
      if constexpr (C::kColumnPositions) {
        ahead().arena.positions(slot, group())[thread()] =
            exists ? block * C::kBlockKv + token : -1;
      }
    }
  }

  // Where there is no tile, zeros are staged, which nobody reads: without a branch, the
  // instructions of a copy fill the gaps between those of the tensor cores. And waiting counts
  // commits.
  WL_FN void copy(int place, int stage, int slot) const {
    Unit* keys = ahead().arena.keys(stage, group());
    Unit* values = ahead().arena.values(stage, group());
    if constexpr (C::kIndexed) {
      copy_listed(ahead().arena.addresses(slot, group()), keys, values);
    } else {
      copy_affine<KeyCopy<K>>(key_rows(ahead()), ring_[place].begin(), keys);
      copy_affine<ValueCopy<K>>(value_rows(ahead()), ring_[place].begin(), values);
    }
    cute::cp_async_fence();
  }
  template <class Copy>
  WL_FN void copy_affine(const TokenRows& tokens, int begin, Unit* to) const {
    const int row = Copy::first_row(thread());
    const AffineRows<Copy> rows{tokens.token_stride, ahead().facts().places.end - begin, row};
    const Unit* from = tokens.first + Copy::column(thread());
    Copy::template copy<kOnce>(from + (begin + row) * tokens.token_stride, rows, to, thread());
  }
  WL_FN void copy_listed(const longlong2* addresses, Unit* keys, Unit* values) const {
    constexpr int kRounds = KeyCopy<K>::kRounds;
    const unsigned me = thread();
    const int first = KeyCopy<K>::first_row(me), column = KeyCopy<K>::column(me);
    longlong2 rows[kRounds];  // read before the first copy: the hardware keeps them in order
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int row = round * KeyCopy<K>::kRoundRows + first;
      rows[round] = addresses[min(row, S::kStagingKeys - 1)];
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const auto from = reinterpret_cast<const Unit*>(rows[round].x) + column;
      KeyCopy<K>::template copy_row<kOnce>(from, rows[round].x >= 0, keys, me, round);
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const auto from = reinterpret_cast<const Unit*>(rows[round].y) + column;
      ValueCopy<K>::template copy_row<kOnce>(from, rows[round].y >= 0, values, me, round);
    }
  }

  int slot_;    // of the tile whose turn it is
  Visit next_;  // the one after those of the ring
  int block_;   // looked up for it
};

}  // namespace warploom
