// Whether a batch may be planned as the one before: by the same planner, for the same kernel, into
// memory of the same layout.
#pragma once

#include <warploom/host_planner/delivery.hpp>
#include <warploom/host_planner/measure.hpp>
#include <warploom/team.hpp>

namespace warploom {

// What `ReplanGuard` of runtime/strategies/replan.py packs, in this order.
struct ReplanGuard {
  // picoseconds of a key tile: of each role, and of a decode that is computed by the prefill tile
  wide prefill, decode, decode_in_tall;
  int spread, longer;  // `Margins` of codegen/choice/role_cost.py
  int readers, ctas;   // decoding CTAs that saturate memory, and all CTAs that may get work
  int heads;           // key/value heads; 0: admits() does not ask whether two roles pay
  RoleSizes sizes;
  int least_requests, most_requests;
  Lengths least, most;
};
static_assert(sizeof(ReplanGuard) == 3 * sizeof(wide) + 24 * sizeof(int),
              "23 numbers, and 4 bytes");

inline bool lies_between(const Lengths& found, const Lengths& least, const Lengths& most) {
  const auto holds = [](int low, int number, int high) { return low <= number && number <= high; };
  return holds(least.busy_requests, found.busy_requests, most.busy_requests) &&
         holds(least.q_rows, found.q_rows, most.q_rows) &&
         holds(least.total_q_rows, found.total_q_rows, most.total_q_rows) &&
         holds(least.longest_q, found.longest_q, most.longest_q) &&
         holds(least.max_kv_len, found.max_kv_len, most.max_kv_len) &&
         holds(least.num_blocks, found.num_blocks, most.num_blocks);
}

// `Forecast.pays` of role_cost.py: whether two roles are faster than one tile, by more than they
// cost. The guard enables this check where 63 bits hold these numbers.
inline bool two_roles_pay(const ReplanGuard& guard, const RoleTiles& of_head) {
  const wide decodes = of_head.decodes * guard.heads;
  const wide prefill = of_head.prefills * guard.heads * guard.prefill;
  const wide decode = decodes * guard.decode, reading = decode / guard.readers;
  const wide alone =
      max(reading + reading / guard.longer, decodes * guard.decode_in_tall / guard.ctas);
  const wide in_turn = prefill / guard.ctas + alone;
  const wide at_once = max(reading, (prefill + decode) / guard.ctas);
  return in_turn - at_once > in_turn / guard.spread;
}

// Measures the lengths of a batch; false if the batch is invalid, or if the guard does not admit
// it.
template <class K>
bool admits(const typename K::Params& p, const ReplanGuard& guard, Measure& found) {
  if (p.num_requests < guard.least_requests || p.num_requests > guard.most_requests) return false;
  if (!measure_lengths(p, found) || !lies_between(found, guard.least, guard.most)) return false;
  return guard.heads == 0 || two_roles_pay(guard, role_tiles<K>(p, guard.sizes));
}

// What became of a batch in replan(); other numbers are those of `PlanStatus`.
enum class ReplanStatus { kSent = 0, kRefused = -1, kUnsent = -2 };

// Measures a batch, plans it if the guard admits it, and sends the plan. `kRefused`: no plan was
// written.
template <class K, class Planner>
int replan(const typename K::Params& p, const ReplanGuard& guard, Measure& found, char* scratch,
           Delivery& delivery) {
  if (!admits<K>(p, guard, found)) return int(ReplanStatus::kRefused);
  int* const memory = delivery.take();
  if (memory == nullptr) return int(ReplanStatus::kRefused);
  auto to_write = planning_to(p, memory);
  const bool is_remote = delivery.is_remote(), has_pages = p.kv_indices != nullptr;
  // A plan that is written in place (not remote) overwrites the plan before, which graph replays
  // may still need. So page numbers are checked before anything is written.
  const bool is_good =
      is_remote ? measure_blocks<true>(to_write, found) : measure_blocks<false>(to_write, found);
  if (!is_good) return int(ReplanStatus::kRefused);
  if (is_remote) to_write.kv_indices = nullptr;  // copied
  Solo team;
  const PlanStatus status = Planner(to_write, team, scratch).run();
  if (status != PlanStatus::kGood) return int(status);
  const bool is_sent = !is_remote || delivery.send(to_write, found.num_blocks, has_pages);
  return int(is_sent ? ReplanStatus::kSent : ReplanStatus::kUnsent);
}

}  // namespace warploom
