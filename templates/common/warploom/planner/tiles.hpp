// Asks the mask which keys a tile of query rows sees, and how many key tiles.
// runtime/planning/visibility.py gives the same answers by the same analysis.
#pragma once

namespace warploom {

struct QueryTile {
  int segment, row_begin, row_end;
};

template <class K>
class MaskOracle {
  using Params = typename K::Params;
  using Variant = typename K::Variant;

 public:
  // A query tile of a request with q_len query rows and kv_len keys; key tiles have `keys` keys.
  WL_FN MaskOracle(const Params& p, int keys, const QueryTile& tile, int q_len, int kv_len)
      : p_(p), keys_(keys), kv_len_(kv_len), info_{tile.segment,  0, q_len, kv_len, p.num_q_heads,
                                                   p.num_kv_heads} {
    const int first = kv_len - q_len;
    q_pos_ = {first + quotient(tile.row_begin, p.group_size),
              first + quotient(tile.row_end - 1, p.group_size) + 1};
  }

  // A range that holds all keys that the tile's rows see. It begins at a multiple of the key tile;
  // {0, 0} if no row sees a key.
  WL_FN Range bounds() {
    Range found{0, kv_len_};
    if constexpr (Variant::kHasLogitsMask) {
      found = {0x7fffffff, -1};
      for (int head = 0; head < heads(); ++head) {
        const Range seen = Variant::kv_bounds(p_, at(head), q_pos_, q_heads(head));
        if (seen.begin >= seen.end) continue;
        found = {min(found.begin, seen.begin), max(found.end, seen.end)};
      }
    }
    const int begin = max(found.begin, 0), end = min(found.end, kv_len_);
    return begin < end ? Range{quotient(begin, keys_) * keys_, end} : Range{0, 0};
  }

  // Number of key tiles in `range`, which begins at a key tile, that the kernel will not skip. A
  // tile of one query position (a decode) mostly sees all of them, so the whole range is classified
  // first. Otherwise the first and the last key tile are classified alone, for masks mostly end
  // there. The key tiles between are classified as one range, which is halved while it is partly
  // visible: a range's class holds for its parts.
  WL_FN int visible(Range range) {
    if (range.begin >= range.end) return 0;
    const int first = quotient(range.begin, keys_), last = (range.end - 1) / keys_ + 1;
    if constexpr (!Variant::kHasLogitsMask) return last - first;
    const int all = last - first;
    const bool is_one_position = q_pos_.end - q_pos_.begin == 1;
    int count = 0;
    for (int low = first, size = is_one_position ? all : 1; low < last;) {
      const TileClass found = classify({low * keys_, min((low + size) * keys_, range.end)});
      if (found == TileClass::kPartial && size > 1) {
        size = size == all ? 1 : size / 2;
        continue;
      }
      count += found == TileClass::kSkip ? 0 : size;
      low += size;
      size = min(low == first + 1 ? all : 2 * size, max(last - 1 - low, 1));
    }
    return count;
  }

  // The first key tile boundary with `wanted` visible key tiles between it and range.begin.
  WL_FN int key_after(Range range, int wanted) {
    const int span = (range.end - range.begin - 1) / keys_ + 1;
    int low = 0, high = span, before = 0;  // in key tiles; invariant: before < wanted
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      const int begin = range.begin + low * keys_;
      const int count = before + visible({begin, min(range.begin + middle * keys_, range.end)});
      if (count >= wanted) {
        high = middle;
      } else {
        low = middle;
        before = count;
      }
    }
    return range.begin + high * keys_;
  }

 private:
  // Heads are classified one by one only if the mask depends on the key/value head.
  WL_FN int heads() const { return K::kMaskReadsKvHead ? p_.num_kv_heads : 1; }
  WL_FN TileInfo at(int head) const {
    TileInfo info = info_;
    info.kv_head = head;
    return info;
  }
  WL_FN Range q_heads(int head) const {
    return heads() > 1 ? Range{head * p_.group_size, (head + 1) * p_.group_size}
                       : Range{0, p_.num_q_heads};
  }
  WL_FN TileClass classify(Range kv_pos) {
    TileClass found = Variant::classify(p_, at(0), q_pos_, kv_pos, q_heads(0));
    for (int head = 1; head < heads(); ++head) {
      const TileClass other = Variant::classify(p_, at(head), q_pos_, kv_pos, q_heads(head));
      found = other == found ? found : TileClass::kPartial;
    }
    return found;
  }

  const Params& p_;
  int keys_, kv_len_;
  TileInfo info_;
  Range q_pos_;
};

}  // namespace warploom
