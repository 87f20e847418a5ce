// Checks and counts a batch on the host, before its kernel and the sizes of its plan are known.
#pragma once

#include <warploom/planner/batch.hpp>
#include <warploom/planner/tiles.hpp>

namespace warploom {

// What `HostPlanner.measure` unpacks, in this order.
struct Lengths {
  int busy_requests, q_rows, total_q_rows, longest_q, max_kv_len, num_blocks;
};
struct Measure : Lengths {
  int kv_extent;  // with page numbers it comes from these: measure_blocks()
};

// Measures all requests; false if `Batch::check` would refuse one. It does not find out which one
// or why, so the loop has no branches and compilers vectorise it.
template <bool kIsPaged, class Params>
bool measure_lengths(const Params& p, Measure& found) {
  const int *const qo = p.qo_indptr, *const kv = p.kv_indptr;
  const wide page_size = p.page_size, most = kMostKeys;
  wide shortest_q = most, longest_q = 0, fewest = most, longest = 0, busy = 0;
  int has_wrong_page = 0;
  for (int r = 0; r < p.num_requests; ++r) {
    const wide num_q = wide(qo[r + 1]) - qo[r], count = wide(kv[r + 1]) - kv[r];
    wide keys = count;
    if constexpr (kIsPaged) {
      const wide last = p.last_page_len[r];
      keys = count > 0 ? (count - 1) * page_size + last : 0;
      has_wrong_page |= (count > 0) & ((last < 1) | (last > page_size));
    }
    shortest_q = min(shortest_q, num_q);
    longest_q = max(longest_q, num_q);
    fewest = min(fewest, count);
    longest = max(longest, keys);
    busy += num_q > 0;
  }
  const int q_rows = qo[p.num_requests], kv_end = kv[p.num_requests];
  const bool is_dense = p.storage == int(Storage::kDense);
  const bool is_even = !is_dense || shortest_q == longest_q;
  found = {{int(busy), is_dense ? int(longest_q) : q_rows, q_rows, int(longest_q), int(longest),
            kIsPaged ? kv_end : 0},
           kIsPaged   ? 0
           : is_dense ? int(longest)
                      : kv_end};
  return qo[0] == 0 && kv[0] == 0 && shortest_q >= 0 && fewest >= 0 && !has_wrong_page &&
         longest <= min(most, wide(p.max_kv_len)) && longest_q * p.group_size <= most &&
         q_rows <= p.max_q_rows && (!kIsPaged || kv_end <= p.max_blocks) &&
         (is_even || p.num_requests == 0);
}

template <class Params>
bool measure_lengths(const Params& p, Measure& found) {
  return p.storage == int(Storage::kPaged) ? measure_lengths<true>(p, found)
                                           : measure_lengths<false>(p, found);
}

// Reads page numbers once, if they lie in host memory, and with kCopies copies them to the plan.
// False if one is negative, or the largest that 32 bits hold.
template <bool kCopies, class Params>
bool measure_blocks(const Params& p, Measure& found) {
  if (p.storage != int(Storage::kPaged) || p.kv_indices == nullptr) return true;
  unsigned last = 0;  // as unsigned, negative numbers are the largest
  const int* const blocks = p.kv_indices;
  [[maybe_unused]] int* const __restrict copy = p.indices;
  const int count = found.num_blocks;
  for (int i = 0; i < count; ++i) {
    const unsigned block = blocks[i];
    last = last < block ? block : last;
    if constexpr (kCopies) copy[i] = int(block);
  }
  if (last >= 0x7fffffff) return false;
  found.kv_extent = count > 0 ? int(last) + 1 : 0;
  return true;
}

// Reads all lengths and page numbers; `found` is valid only if the result is true.
template <class Params>
bool measure(const Params& p, Measure& found) {
  return measure_lengths(p, found) && measure_blocks<false>(p, found);
}

// `RoleSizes` and `RoleTiles` of runtime/formats/batch.py, with fields in the same order: the tiles
// that a batch of prefills and decodes would have.
struct RoleSizes {
  int few_rows, rows, keys, decode_keys;
};
struct RoleTiles {
  wide prefills, decodes;
};

// Number of key tiles from the first to the last that a query tile sees.
template <class K>
int span(const typename K::Params& p, const QueryTile& tile, int keys) {
  const Batch<typename K::Params> batch{p};
  const int kv_len = int(batch.kv_len(tile.segment));
  const Range seen = MaskOracle<K>(p, keys, tile, batch.q_len(tile.segment), kv_len).bounds();
  return quotient(seen.end + keys - 1, keys) - quotient(seen.begin, keys);
}

// Key tiles of one head of a batch that was measured; see `RoleTiles.of`.
template <class K>
RoleTiles role_tiles(const typename K::Params& p, const RoleSizes& sizes) {
  const Batch<typename K::Params> batch{p};
  RoleTiles found = {0, 0};
  for (int r = 0; r < p.num_requests; ++r) {
    const int rows = batch.fused_rows(r);
    if (rows > sizes.few_rows) {
      const int tiles = quotient(rows - 1, sizes.rows) + 1;
      const QueryTile first{r, 0, min(sizes.rows, rows)}, last{r, (tiles - 1) * sizes.rows, rows};
      found.prefills +=
          tiles * wide(span<K>(p, first, sizes.keys) + span<K>(p, last, sizes.keys)) / 2;
    } else if (rows > 0) {
      found.decodes += span<K>(p, {r, 0, rows}, sizes.decode_keys);
    }
  }
  return found;
}

}  // namespace warploom
