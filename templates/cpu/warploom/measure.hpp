// Checks a batch on the host, before its kernel and the sizes of its plan are known.
#pragma once

#include <warploom/planner/batch.hpp>

namespace warploom {

struct Measure {
  int q_rows, longest_q, max_kv_len, kv_end, last_block, busy_requests;
};

// Reads all lengths and page numbers once; `found` counts only if nothing is wrong.
template <class Params>
PlanStatus measure(const Params& p, Measure& found) {
  const Batch<Params> batch{p};
  found = {0, 0, 0, 0, -1, 0};
  if (p.num_requests == 0) return batch.check_empty();
  for (int r = 0; r < p.num_requests; ++r) {
    const PlanStatus status = batch.check(r);
    if (status != PlanStatus::kGood) return status;
    found.longest_q = max(found.longest_q, batch.q_len(r));
    found.busy_requests += batch.q_len(r) > 0;
    found.max_kv_len = max(found.max_kv_len, int(batch.kv_len(r)));
  }
  found.q_rows = p.qo_indptr[p.num_requests];
  found.kv_end = p.kv_indptr[p.num_requests];
  if (!batch.is_paged() || p.kv_indices == nullptr) return PlanStatus::kGood;
  int first = 0, last = -1;
  const int* const blocks = p.kv_indices;
  for (int i = 0, count = found.kv_end; i < count; ++i) {
    first = min(first, blocks[i]);
    last = max(last, blocks[i]);
  }
  found.last_block = last;
  return first < 0 ? PlanStatus::kPage : PlanStatus::kGood;
}

}  // namespace warploom
