// The plan arguments of a batch: lengths of each request, and checks of them.
#pragma once

namespace warploom {

enum class Storage : int { kDense = 0, kRagged = 1, kPaged = 2 };

// Why plan() refuses a batch. The runtime makes the messages (runtime/planning/plan_status.py).
enum class PlanStatus : int {
  kGood = 0,
  kQoStart = 1,     // qo_indptr does not begin at 0
  kQoFalls = 2,     // ... or decreases
  kKvStart = 3,     // kv_indptr does not begin at 0
  kKvFalls = 4,     // ... or decreases
  kUneven = 5,      // dense requests differ in rows
  kPage = 6,        // a page number is negative
  kLastPage = 7,    // last_page_len is not in 1 .. page_size
  kTooLong = 8,     // a request has more keys or fused rows than int32 counts
  kMaxRows = 9,     // more query rows than declared
  kMaxKvLen = 10,   // a request with more keys than declared
  kMaxBlocks = 11,  // more pages than declared
};

// Limit of keys, and of fused rows, of a request: places up to a tile past the end are ints.
constexpr wide kMostKeys = 0x7fffffff - 4096;

// Rounded down. Division is slow, and the planner mostly divides a number by a larger one.
WL_FN int quotient(int value, int by) { return value < by ? 0 : value / by; }
// Neither number is negative. Mostly both fit 32 bits, whose division takes a fraction of the time.
WL_FN wide quotient(wide value, wide by) {
  return (value | by) >> 32 == 0 ? wide(unsigned(value) / unsigned(by)) : value / by;
}

template <class Params>
struct Batch {
  const Params& p;

  WL_FN int q_len(int r) const { return p.qo_indptr[r + 1] - p.qo_indptr[r]; }
  WL_FN int blocks(int r) const { return p.kv_indptr[r + 1] - p.kv_indptr[r]; }
  WL_FN bool is_paged() const { return p.storage == int(Storage::kPaged); }
  WL_FN wide kv_len(int r) const {
    const int count = blocks(r);
    if (!is_paged()) return count;
    return count > 0 ? wide(count - 1) * p.page_size + p.last_page_len[r] : 0;
  }
  WL_FN int fused_rows(int r) const { return q_len(r) * p.group_size; }  // if check() accepts r

  // Checks a batch without requests: only the first entries of its indptr arrays can be wrong.
  WL_FN PlanStatus check_empty() const {
    if (p.qo_indptr[0] != 0) return PlanStatus::kQoStart;
    return p.kv_indptr[0] != 0 ? PlanStatus::kKvStart : PlanStatus::kGood;
  }

  // Checks one request; returns its first error in the order of PlanStatus. All loads come first,
  // so that a device waits for memory once.
  WL_FN PlanStatus check(int r) const {
    const int q_begin = p.qo_indptr[r], q_end = p.qo_indptr[r + 1], num_q = q_end - q_begin;
    const int kv_begin = p.kv_indptr[r], kv_end = p.kv_indptr[r + 1], count = kv_end - kv_begin;
    const int last_page = is_paged() ? p.last_page_len[r] : 1;
    const bool has_pages = is_paged() && count > 0;
    const wide keys = has_pages ? wide(count - 1) * p.page_size + last_page : count;
    if (r == 0 && q_begin != 0) return PlanStatus::kQoStart;
    if (num_q < 0) return PlanStatus::kQoFalls;
    if (r == 0 && kv_begin != 0) return PlanStatus::kKvStart;
    if (count < 0) return PlanStatus::kKvFalls;
    if (p.storage == int(Storage::kDense) && num_q != q_len(0)) return PlanStatus::kUneven;
    if (has_pages && (last_page < 1 || last_page > p.page_size)) return PlanStatus::kLastPage;
    if (keys > kMostKeys || wide(num_q) * p.group_size > kMostKeys) return PlanStatus::kTooLong;
    if (q_end > p.max_q_rows) return PlanStatus::kMaxRows;
    if (keys > p.max_kv_len) return PlanStatus::kMaxKvLen;
    if (is_paged() && kv_end > p.max_blocks) return PlanStatus::kMaxBlocks;
    return PlanStatus::kGood;
  }

  // Every member is written, by name: compilers keep zeroed records in memory, not in registers.
  template <class Segment>
  WL_FN Segment segment(int r) const {
    const int kv_begin = p.kv_indptr[r];
    const bool is_dense = p.storage == int(Storage::kDense);
    Segment s;
    s.batch = r;
    s.q_row = is_dense ? 0 : p.qo_indptr[r];
    s.num_q = s.q_len = q_len(r);
    s.kv_len = s.kv_count = int(kv_len(r));
    s.kv_block = is_dense ? r : 0;
    s.kv_row = p.storage == int(Storage::kRagged) ? kv_begin : 0;
    s.index_begin = is_paged() ? kv_begin : 0;
    s.q_idx = s.kv_pos = s.index_head_stride = 0;
    return s;
  }
};

}  // namespace warploom
