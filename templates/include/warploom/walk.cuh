// Which tiles of keys a group of threads visits, and which mask code each of them needs.
#pragma once

#include <warploom/gather.cuh>

namespace warploom {

// A tile of keys on its way through the pipeline. Its first place in the segment's list is a multiple of
// 16, which leaves room for its class in the same register.
struct Visit {
  int begin_and_class;
  int block;  // what this thread looked up for the copies
  int slot;   // of Arena::positions

  WL_FN Visit() {}
  WL_FN Visit(int begin, TileClass tile_class, int block_of_row, int slot_of_tile)
      : begin_and_class(begin | static_cast<int>(tile_class)),
        block(block_of_row),
        slot(slot_of_tile) {}
  WL_FN int begin() const { return begin_and_class & ~15; }
  WL_FN bool is_full() const { return (begin_and_class & 15) == static_cast<int>(TileClass::kFull); }
};

// Walks the places [next_begin, end) in steps of the CTA's tile; skips tiles that no row sees.
template <class K>
class KeyWalk {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Variant = typename K::Variant;

 public:
  static constexpr int kNone = 0x7ffffff0;  // where a tile begins that does not exist
  int end;

  WL_FN KeyWalk(const Item<K>& item, int group)
      : end(item.work.kv_end), item_(item), next_(item.work.kv_begin), slot_(0) {
    if constexpr (Variant::kHasLogitsMask) {
      const RowInfo first = item.locate(0), last = item.locate(item.rows - 1);
      const int head = item.work.kv_head * item.p.group_size;
      q_pos_ = {first.q_pos, last.q_pos + 1};
      q_head_ = first.q_pos == last.q_pos ? Range{first.q_head, last.q_head + 1}
                                          : Range{head, head + item.p.group_size};
    }
    if constexpr (Variant::kHasLogitsMask && !C::kColumnPositions) {
      // Whole tiles before the first visible key are left out, so that tiles lie as planned.
      const Range seen = Variant::kv_bounds(item.p, item.tile, q_pos_, q_head_);
      const int hidden = max(seen.begin - item.segment.kv_pos - next_, 0);
      next_ += hidden / C::kKeys * C::kKeys;
      end = min(end, seen.end - item.segment.kv_pos);
    }
    next_ += group * S::kGroupKeys;
  }

  WL_FN Visit next(unsigned thread) {
    for (; next_ < end; next_ += C::kKeys) {
      const TileClass tile_class = classify(next_);
      if (tile_class == TileClass::kSkip) continue;
      const Visit visit{next_, tile_class, look_up(next_, thread), slot_};
      next_ += C::kKeys;
      if constexpr (C::kColumnPositions) slot_ = slot_ == C::kStages ? 0 : slot_ + 1;
      return visit;
    }
    return {kNone, TileClass::kPartial, -1, 0};
  }

 private:
  WL_FN int look_up(int begin, unsigned thread) const {
    if constexpr (C::kIndexed) {
      return block_of(item_, begin + KeyCopy<K>::looked_up_row(thread), end);
    }
    return 0;
  }

  WL_FN TileClass classify(int begin) const {
    const int last = min(begin + S::kGroupKeys, end);
    bool is_whole = last == begin + S::kGroupKeys;
    Range kv_pos{item_.segment.kv_pos + begin, item_.segment.kv_pos + last};
    if constexpr (C::kColumnPositions) {
      kv_pos = column_range(begin, is_whole);
      if (kv_pos.begin >= kv_pos.end) return TileClass::kSkip;
    }
    TileClass found = TileClass::kFull;
    if constexpr (Variant::kHasLogitsMask) {
      found = Variant::classify(item_.p, item_.tile, q_pos_, kv_pos, q_head_);
    }
    return found == TileClass::kFull && !is_whole ? TileClass::kPartial : found;
  }

  // Least and greatest position in a tile of listed columns; every warp finds the same.
  WL_FN Range column_range(int begin, bool& is_whole) const {
    int low = 0x7fffffff, high = -1;
    bool all = true;
#pragma unroll
    for (int i = 0; i < S::kGroupKeys; i += kWarpSize) {
      const int key = i + threadIdx.x % kWarpSize;
      const int place = begin + key;
      const int block = key < S::kGroupKeys ? block_of(item_, place, end) : -1;
      const int position = block * C::kBlockKv + place % C::kBlockKv;
      low = block < 0 ? low : min(low, position);
      high = block < 0 ? high : max(high, position);
      all = all && (block >= 0 || key >= S::kGroupKeys);
    }
    is_whole = __all_sync(kAllLanes, all);
    return {__reduce_min_sync(kAllLanes, low), __reduce_max_sync(kAllLanes, high) + 1};
  }

  const Item<K>& item_;
  Range q_pos_, q_head_;  // of the tile's rows
  int next_;
  int slot_;
};

// Positions of the keys of one staged tile.
template <class K>
struct Columns {
  using C = typename K::Config;

  int first;             // position of the tile's first key, unless they are listed
  int count;             // keys that exist
  const int* positions;  // Arena::positions of listed columns

  WL_FN Columns(const Item<K>& item, const KeyWalk<K>& walk, const Visit& visit,
                const int* positions_of_tile)
      : first(item.segment.kv_pos + visit.begin()),
        count(walk.end - visit.begin()),
        positions(positions_of_tile) {}

  WL_FN int kv_pos(int key) const {
    if constexpr (C::kColumnPositions) return positions[key];
    return first + key;
  }
  WL_FN bool exists(int key) const {
    if constexpr (C::kColumnPositions) return positions[key] >= 0;
    return key < count;
  }
};

}  // namespace warploom
