// The cp.async pipeline: a ring of tiles, kStages of keys and values in shared memory.
//
// Where warps stream keys, the ring goes on over the borders of items.
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
  static constexpr bool kOnce = K::template Arena<K>::kReadsOnce;

 public:
  // Items follow each other up to `end`; `index` is that of the first.
  WL_FN KeyPipeline(const Item<K>& item, int index, int end)
      : walk_(item, group()),
        now_(index),
        found_(index),
        end_(end),
        may_find_(index),
        stage_(0),
        slot_(0) {}

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

  // Takes up an item, everyone's facts of which and of the next are known. The gaps in front of
  // its tiles are left out: they are from when nothing was known of the item.
  WL_FN void begin(int index) {
    now_ = index;
    may_find_ = min(index + 1, end_ - 1);
    while (ring_[0].is_of(index - 1)) {
      wait();
      copy_ahead();
      advance();
    }
  }
  // True while a tile of the item is next.
  WL_FN bool has_tile() const {
    return ring_[0].exists() && (!S::kSplitKeys || ring_[0].is_of(now_));
  }
  WL_FN const Visit& visit() const { return ring_[0]; }
  WL_FN Unit* keys() const { return ahead().arena.keys(stage_, group()); }
  WL_FN Unit* values() const { return ahead().arena.values(stage_, group()); }
  WL_FN Element* new_keys() const { return ahead().arena.new_keys(stage_, group()); }
  WL_FN Element* new_values() const { return ahead().arena.new_values(stage_, group()); }
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
    copy(C::kStages - 1, stage_ == 0 ? C::kStages - 1 : stage_ - 1, slot(C::kStages - 1));
    next_ = find();
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
  WL_FN const Item<K>& ahead() const { return walk_.item(); }

  // The next tile, of the item that was searched last or of the one after it.
  WL_FN Visit find() {
    Visit visit = walk_.next();
    if constexpr (S::kSplitKeys) {
      while (!visit.exists() && found_ < may_find_) {
        walk_.move_to(++found_, group());
        visit = walk_.next();
      }
      visit = visit.tagged(found_);
    }
    return visit;
  }

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

  KeyWalk<K> walk_;         // of the item of the tile found last
  int now_, found_, end_;   // indices: of the item at hand, of that one, behind the last
  int may_find_;            // index of the last item whose facts are known
  int stage_;               // of the tile whose turn it is
  int slot_;                // likewise
  Visit ring_[C::kStages];  // tiles from that one on
  Visit next_;              // the one after these
  int block_;               // looked up for it
};

}  // namespace warploom
