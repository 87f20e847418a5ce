// Appending to a paged cache, as both back ends see it: where a new token goes, and the seats of
// keys and values behind one interface.
#pragma once

#include <warploom/narrow.hpp>

namespace warploom {

// Where row `row` of the new tokens goes. All of it is read where the kernel runs, so a captured
// graph appends whatever the tables then hold.
struct AppendPlace {
  int batch, q_len, kv_len;  // request, its new tokens, its tokens with the new ones
  int kv_pos;
  long long page;
  int token;    // within the page
  bool exists;  // false: the tables name no place in the cache, and nothing is written
};

// The request that row `row` belongs to: the last one that begins at or before it.
template <class Params>
WL_FN int request_of(const Params& p, int row) {
  int low = 0, high = p.num_requests - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.indptr[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <class Params>
WL_FN AppendPlace place_of(const Params& p, int row, int page_size) {
  const int batch = request_of(p, row);
  const int begin = p.indptr[batch], q_len = p.indptr[batch + 1] - begin;
  const int first_page = p.kv_indptr[batch], pages = p.kv_indptr[batch + 1] - first_page;
  const int kv_len = pages > 0 ? (pages - 1) * page_size + p.last_page_len[batch] : 0;
  const int kv_pos = kv_len - q_len + row - begin;
  const int index = first_page + kv_pos / page_size;
  AppendPlace place{batch, q_len, kv_len, kv_pos, 0, kv_pos % page_size, false};
  if (kv_pos < 0 || kv_pos / page_size >= pages || index >= p.num_indices) return place;
  place.page = p.kv_indices[index];
  place.exists = place.page >= 0 && place.page < p.num_pages;
  return place;
}

template <class Params>
WL_FN TileInfo tile_of(const Params& p, const AppendPlace& place, int kv_head) {
  return {place.batch, kv_head, place.q_len, place.kv_len, p.num_q_heads, p.num_kv_heads};
}

// One interface for the two seats, with the strides and pointers that belong to each.
#define WL_APPEND_SEAT(Name, seat, Title, letter, dim)                                          \
  template <class K>                                                                            \
  struct Name {                                                                                 \
    using Variant = typename K::Variant;                                                        \
    using Params = typename K::Params;                                                          \
    static constexpr bool kActive = Variant::kHas##Title##Transform;                            \
    static constexpr int kReductions = Variant::k##Title##Reductions;                           \
    static constexpr int kHeadDim = K::Config::dim;                                             \
    template <int I>                                                                            \
    WL_FN static float identity() {                                                             \
      return Variant::template seat##_identity<I>();                                            \
    }                                                                                           \
    template <int I>                                                                            \
    WL_FN static float combine(float a, float b) {                                              \
      return Variant::template seat##_combine<I>(a, b);                                         \
    }                                                                                           \
    template <int I, class X>                                                                   \
    WL_FN static float reduce(const Params& p, const TileInfo& tile, int kv_pos, int lane,      \
                              const X& x, const float* r) {                                     \
      return Variant::template seat##_reduce<I>(p, tile, kv_pos, lane, kHeadDim, x, r);         \
    }                                                                                           \
    template <class X>                                                                          \
    WL_FN static float value(const Params& p, const TileInfo& tile, int kv_pos, int lane,       \
                             const X& x, const float* r) {                                      \
      const auto of_tile = Variant::seat##_tile(p, tile);                                       \
      const auto state = Variant::seat##_lane(p, tile, of_tile, lane, kHeadDim);                \
      return Variant::seat(p, tile, kv_pos, state, lane, kHeadDim, x, r);                       \
    }                                                                                           \
    WL_FN static const typename K::Config::Element* from(const Params& p, int row, int head) {  \
      return static_cast<const typename K::Config::Element*>(p.letter) +                        \
             row * p.letter##_row_stride + head * p.letter##_head_stride;                       \
    }                                                                                           \
    WL_FN static typename K::Config::KvElement* to(const Params& p, const AppendPlace& place,   \
                                                   int head) {                                  \
      return static_cast<typename K::Config::KvElement*>(p.letter##_cache) +                    \
             place.page * p.letter##_cache_block_stride +                                       \
             place.token * p.letter##_cache_token_stride + head * p.letter##_cache_head_stride; \
    }                                                                                           \
  };

WL_APPEND_SEAT(NewKey, key, Key, k, kHeadDimQk)
WL_APPEND_SEAT(NewValue, value, Value, v, kHeadDimV)
#undef WL_APPEND_SEAT

// A vector in memory, as functors read it.
template <class Element>
struct StoredVector : LaneByLane<StoredVector<Element>> {
  const Element* from;
  WL_FN explicit StoredVector(const Element* vector) : from(vector) {}
  WL_FN float operator()(int lane) const { return to_float(from[lane]); }
};

}  // namespace warploom
