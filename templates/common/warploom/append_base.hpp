// Appending to a paged cache, as both back ends see it: where new vectors come from and go.
#pragma once

#include <warploom/round_to_8_bits.hpp>
#include <warploom/stored_hooks.hpp>

namespace warploom {

// Where row `row` of the new tokens goes. All of it is read from the tables when the kernel runs,
// so a replayed graph appends by what the tables then hold.
struct AppendPlace {
  int batch, q_len, kv_len;  // request, its new tokens, its tokens with the new ones
  int kv_pos;
  long long page;
  int token;    // within the page
  bool exists;  // false: the tables name no request or no place, and nothing is written
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
  const bool is_owned = row >= begin && row - begin < q_len;
  const int kv_pos = kv_len - q_len + row - begin;
  const int index = first_page + kv_pos / page_size;
  AppendPlace place{batch, q_len, kv_len, kv_pos, 0, kv_pos % page_size, false};
  const bool is_listed = index >= 0 && index < p.num_indices;  // the device's tables are unchecked
  if (!is_owned || kv_pos < 0 || kv_pos / page_size >= pages || !is_listed) return place;
  place.page = p.kv_indices[index];
  place.exists = place.page >= 0 && place.page < p.num_pages;
  return place;
}

template <class Params>
WL_FN TileInfo tile_of(const Params& p, const AppendPlace& place, int kv_head) {
  return {place.batch, kv_head, place.q_len, place.kv_len, p.num_q_heads, p.num_kv_heads};
}

// The two hooks, with the strides and pointers that belong to each.
#define WL_APPEND_HOOK(Name, Hook, letter)                                                      \
  template <class K>                                                                            \
  struct Name : Hook<K> {                                                                       \
    using Params = typename K::Params;                                                          \
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

WL_APPEND_HOOK(NewKey, StoredKey, k)
WL_APPEND_HOOK(NewValue, StoredValue, v)
#undef WL_APPEND_HOOK

}  // namespace warploom
