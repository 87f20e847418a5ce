// Which tiles of keys a group of threads visits, and which mask code each of them needs.
#pragma once

#include <warploom/staging/gather.cuh>

namespace warploom {

// A tile of keys on its way through the pipeline. Its first place in the segment's list is a
// multiple of 16, which leaves room for its class and a tag in the same register.
struct Visit {
  // The begin of a tile that does not exist: past all others, and its last key still is an int.
  static constexpr int kNone = 0x7fffff00;

  int bits;

  WL_FN Visit() {}
  WL_FN Visit(int begin, TileClass tile_class) : bits(begin | static_cast<int>(tile_class)) {}
  WL_FN int begin() const { return bits & ~15; }
  WL_FN bool exists() const { return bits < kNone; }
  WL_FN bool is_full() const { return is(TileClass::kFull); }
  WL_FN bool is(TileClass tile_class) const { return (bits & 3) == static_cast<int>(tile_class); }
  // The tag distinguishes items that follow each other.
  WL_FN Visit tagged(int item) const {
    Visit visit;
    visit.bits = bits | (item & 3) << 2;
    return visit;
  }
  WL_FN bool is_of(int item) const { return (bits >> 2 & 3) == (item & 3); }
  // Instead of the tag, where items do not mix: whether it is an item's first tile, and the last.
  WL_FN Visit as_first() const {
    Visit visit;
    visit.bits = bits | kFirst;
    return visit;
  }
  WL_FN bool is_first() const { return (bits & kFirst) != 0; }
  WL_FN Visit before(const Visit& next) const {
    Visit visit;
    visit.bits = bits | (next.exists() ? 0 : kLast);
    return visit;
  }
  WL_FN bool is_last() const { return (bits & kLast) != 0; }

 private:
  static constexpr int kFirst = 4, kLast = 8;
};

// Walks an item's places in steps of the CTA's tile; skips tiles that no row sees.
template <class K>
class KeyWalk {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Variant = typename K::Variant;

 public:
  // Whether tiles that need only the mask's open part are a class apart from other partial tiles.
  static constexpr bool kDistinguishesOpen = Variant::kMaskHasParts && !C::kComposed && !S::kSingle;

  WL_FN KeyWalk(const Item<K>& item, int group) : item_(item) { restart(group); }

  WL_FN const Item<K>& item() const { return item_; }
  // Goes on with the first key of another item of the CTA.
  WL_FN void move_to(int index, int group) {
    item_.arena.index = index;
    restart(group);
  }

  WL_FN Visit next() {
    bool was_hidden = false;  // the tile before; mostly only one tile is hidden
    for (; next_ < item_.facts().places.end; next_ += C::kKeys) {
      const TileClass tile_class = classify(next_);
      if (tile_class == TileClass::kSkip) {
        if (was_hidden) next_ += hidden_behind();
        was_hidden = true;
        continue;
      }
      const Visit visit(next_, tile_class);
      next_ += C::kKeys;
      return visit;
    }
    return {Visit::kNone, TileClass::kPartial};
  }

  // Class of the tile that begins at a place of the item.
  WL_FN TileClass classify(int begin) const {
    const ItemFacts<K>& facts = item_.facts();
    const int last = min(begin + S::kStagingKeys, facts.places.end);
    bool is_whole = last == begin + S::kStagingKeys;
    Range kv_pos{facts.kv_pos + begin, facts.kv_pos + last};
    if constexpr (C::kColumnPositions) {
      kv_pos = column_range(begin, is_whole);
      if (kv_pos.begin >= kv_pos.end) return TileClass::kSkip;
    }
    TileClass found = TileClass::kFull;
    if constexpr (Variant::kHasLogitsMask) {
      if constexpr (C::kComposed) {
        if (!facts.sees_all) found = classify_rows(kv_pos);
      } else {
        found = Variant::classify(item_.p, facts.tile, facts.q_pos, kv_pos, facts.q_head);
        if (kDistinguishesOpen && found == TileClass::kPartial &&
            !Variant::decided_may_hide(item_.p, facts.tile, facts.q_pos, kv_pos, facts.q_head)) {
          found = TileClass::kOpen;
        }
      }
    }
    return found == TileClass::kFull && !is_whole ? TileClass::kPartial : found;
  }

 private:
  // How many places behind a hidden tile are hidden, too, in steps of the CTA's tile. A range's
  // class holds for its parts, so each step classifies twice as many places: a window leaves out
  // most keys of a long context behind its sinks. Where each row sees a single run of keys, an item
  // has few hidden tiles, since it begins and ends where its rows do (Item::write_bounds), and the
  // code is not worth its registers.
  WL_FN int hidden_behind() const {
    int size = C::kKeys;
    if constexpr (Variant::kHasLogitsMask && !Variant::kMaskShowsRuns && !C::kComposed &&
                  !C::kColumnPositions) {
      const ItemFacts<K>& facts = item_.facts();
      const int left = facts.places.end - next_, first = facts.kv_pos + next_;
      for (int more; size < left; size += more) {
        more = min(size, left - size);
        const Range kv_pos{first, first + size + more};
        const TileClass found =
            Variant::classify(item_.p, facts.tile, facts.q_pos, kv_pos, facts.q_head);
        if (found != TileClass::kSkip) break;
      }
    }
    return size - C::kKeys;
  }

  // The tile's class for rows of several requests; every warp classifies all rows.
  WL_FN TileClass classify_rows(Range kv_pos) const {
    bool may_see = false, may_hide = false;
    for (int r = threadIdx.x % kWarpSize; r < item_.facts().rows; r += kWarpSize) {
      const Row<K>& row = item_.row(r);
      const TileClass c = Variant::classify(item_.p, item_.tile_of(row), {row.q_pos, row.q_pos + 1},
                                            kv_pos, {row.q_head, row.q_head + 1});
      may_see |= c != TileClass::kSkip;
      may_hide |= c != TileClass::kFull;
    }
    return tile_class(__any_sync(kAllLanes, may_see), __any_sync(kAllLanes, may_hide));
  }

  // Least and greatest position in a tile of listed columns; every warp finds the same.
  WL_FN Range column_range(int begin, bool& is_whole) const {
    int low = 0x7fffffff, high = -1;
    bool all = true;
#pragma unroll
    for (int i = 0; i < S::kStagingKeys; i += kWarpSize) {
      const int key = i + threadIdx.x % kWarpSize;
      const int place = begin + key;
      const int block = key < S::kStagingKeys ? block_of(item_, place) : -1;
      const int position = block * C::kBlockKv + place % C::kBlockKv;
      low = block < 0 ? low : min(low, position);
      high = block < 0 ? high : max(high, position);
      all = all && (block >= 0 || key >= S::kStagingKeys);
    }
    is_whole = __all_sync(kAllLanes, all);
    return {__reduce_min_sync(kAllLanes, low), __reduce_max_sync(kAllLanes, high) + 1};
  }

  WL_FN void restart(int group) { next_ = item_.facts().places.begin + group * S::kStagingKeys; }

  Item<K> item_;
  int next_;
};

// Positions of the keys of one staged tile.
template <class K>
struct Columns {
  using C = typename K::Config;

  int first;             // position of the tile's first key, unless they are listed
  int count;             // keys that exist
  const int* positions;  // Arena::positions of listed columns
  using State = typename K::Variant::ColState;
  const State* states;  // what hooks on logits keep of each key, if that is staged

  WL_FN Columns(const Item<K>& item, const Visit& visit, const int* positions_of_tile,
                const State* states_of_tile = nullptr)
      : first(item.facts().kv_pos + visit.begin()),
        count(item.facts().places.end - visit.begin()),
        positions(positions_of_tile),
        states(states_of_tile) {}

  WL_FN int kv_pos(int key) const {
    if constexpr (C::kColumnPositions) return positions[key];
    return first + key;
  }
  WL_FN int place(int key) const { return kv_pos(key); }  // for transform_rows
  WL_FN bool exists(int key) const {
    if constexpr (C::kColumnPositions) return positions[key] >= 0;
    return key < count;
  }
  // False only if every key of the tile surely exists. With listed columns always true: of these
  // only a full tile surely has all keys.
  WL_FN bool may_lack_some() const { return C::kColumnPositions || count < Sizes<K>::kStagingKeys; }
};

}  // namespace warploom
