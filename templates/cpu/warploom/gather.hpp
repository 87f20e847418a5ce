// Where the keys of a tile lie: a pointer per key, from an affine address or through the block
// list, and the position of each. Everything after it is the same for all KV formats.
#pragma once

#include <warploom/item.hpp>
#include <warploom/token_slots.hpp>

namespace warploom {

// Rows past the end of a list point here: loads stay in bounds, and 0 x NaN cannot happen.
template <class Element>
inline constexpr Element kZeroRow[256] = {};

template <class K>
struct KeyTile {
  using Config = typename K::Config;
  using Element = typename Config::KvElement;

  int count;       // keys of the list in this tile
  int first_pos;   // kv_pos of key 0, if positions run on
  Range kv_pos;    // bounds of all positions; empty if no key exists
  bool has_holes;  // some of the `count` keys do not exist (columns past kv_len)
  alignas(64) const Element* key[Config::kKeys];
  alignas(64) const Element* value[Config::kKeys];
  alignas(64) int column[Config::kKeys];  // kv_pos of each
  typename K::Variant::ColState state[Config::kKeys];

  int position(int j) const { return Config::kColumnPositions ? column[j] : first_pos + j; }

  struct Rows {
    const Element *key, *value;
  };

  // Points at list entries [begin, begin + n) and, up to the whole tile, at zeros.
  void gather(const Item<K>& item, int begin, int n) {
    count = n;
    first_pos = item.segment.kv_pos + begin;
    kv_pos = {first_pos, first_pos + n};
    has_holes = false;
    for (int j = 0; j < n; ++j) {
      const Rows rows = locate(item, begin + j);
      key[j] = rows.key;
      value[j] = rows.value;
    }
    for (int j = n; j < Config::kKeys; ++j) key[j] = value[j] = kZeroRow<Element>;
    for (int j = 0; j < Config::kKeys; ++j) column[j] = first_pos + j;
    if constexpr (Config::kColumnPositions) find_columns(item, begin);
  }

  bool exists(int j) const {
    return j < count && (!Config::kColumnPositions || key[j] != kZeroRow<Element>);
  }

  // Where entry i of the list lies.
  static WL_INLINE Rows locate(const Item<K>& item, int i) {
    const auto& p = item.p;
    const auto& s = item.segment;
    long long block = s.kv_block, token = s.kv_row;  // where the request begins, if keys are ragged
    if constexpr (Config::kBlockKv > 0) {
      block = TokenSlots<Config>::of(p.indices[s.index_begin + i / Config::kBlockKv]);
      token += i % Config::kBlockKv;
    } else {
      token += i;
    }
    const long long head = item.work.kv_head;
    return {static_cast<const Element*>(p.k) + block * p.k_block_stride + token * p.k_token_stride +
                head * p.k_head_stride,
            static_cast<const Element*>(p.v) + block * p.v_block_stride + token * p.v_token_stride +
                head * p.v_head_stride};
  }

  void hoist(const Item<K>& item) {
    if constexpr (Config::kComposed) return;  // columns look different to rows of other requests
    for (int j = 0; j < count; ++j) {
      state[j] = K::Variant::col_state(item.p, item.tile, item.state, position(j));
    }
  }

 private:
  void find_columns(const Item<K>& item, int begin) {
    kv_pos = {item.tile.kv_len, 0};
    for (int j = 0; j < count; ++j) {
      const int i = begin + j;
      const int block = item.p.indices[item.segment.index_begin + i / Config::kBlockKv];
      column[j] = block * Config::kBlockKv + i % Config::kBlockKv;
      if (column[j] < item.tile.kv_len) {
        kv_pos = {min_int(kv_pos.begin, column[j]), max_int(kv_pos.end, column[j] + 1)};
      } else {
        key[j] = value[j] = kZeroRow<Element>;
        has_holes = true;
      }
    }
    for (int j = count; j < Config::kKeys; ++j) column[j] = item.tile.kv_len;
  }
};

// Rows of the tile that comes next, to the second-level cache, a line at a time between
// computations. Those that packing has to fetch itself come at the pace of the memory's latency.
template <class K>
class KeysAhead {
  using Config = typename K::Config;
  using Element = typename Config::KvElement;

 public:
  explicit KeysAhead(const Item<K>& item) : item_(item) {}

  // From now on fetches entries [begin, end) of the list.
  void start(int begin, int end) {
    entry_ = begin;
    end_ = end;
    if (entry_ < end_) find_rows();
  }

  // Always inline: compilers take a function that only prefetches for one that does nothing.
  WL_INLINE void fetch_line() {
    if (entry_ >= end_) return;
    __builtin_prefetch(line_, 0, 2);
    line_ += kLine;
    if (line_ >= row_end_) next_row();
  }

 private:
  static constexpr int kLine = 64;

  void find_rows() {
    const auto rows = KeyTile<K>::locate(item_, entry_);
    line_ = reinterpret_cast<const char*>(rows.key);
    row_end_ = line_ + sizeof(Element) * Config::kHeadDimQk;
    value_ = reinterpret_cast<const char*>(rows.value);
  }

  void next_row() {
    if (value_ != nullptr) {
      line_ = value_;
      row_end_ = line_ + sizeof(Element) * Config::kHeadDimV;
      value_ = nullptr;
    } else if (++entry_ < end_) {
      find_rows();
    }
  }

  const Item<K>& item_;
  int entry_ = 0, end_ = 0;
  const char *line_ = nullptr, *row_end_ = nullptr;
  const char* value_ = nullptr;  // of the same entry, if it is still to come
};

}  // namespace warploom
