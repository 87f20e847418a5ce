// Whether a batch may be planned as the one before: by the same planner, for the same kernel, into
// memory of the same layout.
#pragma once

#include <warploom/host_planner/measure.hpp>

namespace warploom {

// What `Again` of runtime/strategies/again.py packs, in this order.
struct Alike {
  // picoseconds of a key tile of each role, and of a decode's in a tile of prefills
  wide prefill, decode, decode_in_tall;
  wide opening;  // `Margins` of codegen/choice/role_cost.py
  int spread, longer;
  int readers, ctas;  // CTAs among which decodes alone share memory, and all that may get work
  int heads;          // of keys and values; 0: nobody asks whether two roles pay
  RoleSizes sizes;
  int least_requests, most_requests;
  Measure least, most;
};
static_assert(sizeof(Alike) == 4 * sizeof(wide) + 26 * sizeof(int), "25 numbers, and 4 bytes");

inline bool lies_between(const Measure& found, const Measure& least, const Measure& most) {
  const auto holds = [](int low, int number, int high) { return low <= number && number <= high; };
  return holds(least.busy_requests, found.busy_requests, most.busy_requests) &&
         holds(least.q_rows, found.q_rows, most.q_rows) &&
         holds(least.total_q_rows, found.total_q_rows, most.total_q_rows) &&
         holds(least.longest_q, found.longest_q, most.longest_q) &&
         holds(least.max_kv_len, found.max_kv_len, most.max_kv_len) &&
         holds(least.num_blocks, found.num_blocks, most.num_blocks) &&
         holds(least.kv_extent, found.kv_extent, most.kv_extent);
}

// `Forecast.pays` of role_cost.py: whether two roles are faster than one tile, by more than they
// cost. `Again` asks where 63 bits hold these numbers.
inline bool two_roles_pay(const Alike& like, const RoleTiles& of_head) {
  const wide decodes = of_head.decodes * like.heads;
  const wide prefill = of_head.prefills * like.heads * like.prefill;
  const wide decode = decodes * like.decode, reading = decode / like.readers;
  const wide alone =
      max(reading + reading / like.longer, decodes * like.decode_in_tall / like.ctas);
  const wide in_turn = prefill / like.ctas + alone;
  const wide at_once = max(reading, (prefill + decode) / like.ctas);
  return in_turn - at_once >= like.opening + in_turn / like.spread;
}

// Measures a batch; false if it is wrong or another one than the like, whichever.
template <class K>
bool is_alike(const typename K::Params& p, const Alike& like, Measure& found) {
  if (p.num_requests < like.least_requests || p.num_requests > like.most_requests) return false;
  if (!measure(p, found) || !lies_between(found, like.least, like.most)) return false;
  return like.heads == 0 || two_roles_pay(like, role_tiles<K>(p, like.sizes));
}

}  // namespace warploom
