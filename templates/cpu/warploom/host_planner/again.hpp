// Whether a batch may be planned as the one before: by the same planner, for the same kernel, into
// memory of the same layout.
#pragma once

#include <warploom/host_planner/delivery.hpp>
#include <warploom/host_planner/measure.hpp>
#include <warploom/team.hpp>

namespace warploom {

// What `Again` of runtime/strategies/again.py packs, in this order.
struct Alike {
  // picoseconds of a key tile: of each role, and of a decode that is computed by the prefill tile
  wide prefill, decode, decode_in_tall;
  int spread, longer;  // `Margins` of codegen/choice/role_cost.py
  int readers, ctas;   // decoding CTAs that saturate memory, and all CTAs that may get work
  int heads;           // key/value heads; 0: is_alike() does not ask whether two roles pay
  RoleSizes sizes;
  int least_requests, most_requests;
  Lengths least, most;
};
static_assert(sizeof(Alike) == 3 * sizeof(wide) + 24 * sizeof(int), "23 numbers, and 4 bytes");

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
// cost. `Again` enables this check where 63 bits hold these numbers.
inline bool two_roles_pay(const Alike& like, const RoleTiles& of_head) {
  const wide decodes = of_head.decodes * like.heads;
  const wide prefill = of_head.prefills * like.heads * like.prefill;
  const wide decode = decodes * like.decode, reading = decode / like.readers;
  const wide alone =
      max(reading + reading / like.longer, decodes * like.decode_in_tall / like.ctas);
  const wide in_turn = prefill / like.ctas + alone;
  const wide at_once = max(reading, (prefill + decode) / like.ctas);
  return in_turn - at_once > in_turn / like.spread;
}

// Measures the lengths of a batch; false if the batch is invalid, or if it is not like `like`.
template <class K>
bool is_alike(const typename K::Params& p, const Alike& like, Measure& found) {
  if (p.num_requests < like.least_requests || p.num_requests > like.most_requests) return false;
  if (!measure_lengths(p, found) || !lies_between(found, like.least, like.most)) return false;
  return like.heads == 0 || two_roles_pay(like, role_tiles<K>(p, like.sizes));
}

// What is left to do for a batch after plan_again().
enum class Left { kNothing = 0, kAll = -1, kSending = -2 };  // other numbers: `PlanStatus`

// Measures a batch, plans it if it is like another, and sends the plan. `kAll`: no plan was
// written.
template <class K, class Planner>
int plan_again(const typename K::Params& p, const Alike& like, Measure& found, char* scratch,
               Delivery& delivery) {
  if (!is_alike<K>(p, like, found)) return int(Left::kAll);
  int* const memory = delivery.take();
  if (memory == nullptr) return int(Left::kAll);
  auto to_write = planning_to(p, memory);
  const bool is_remote = delivery.is_remote(), has_pages = p.kv_indices != nullptr;
  // A plan that is written in place (not remote) overwrites the plan before, which graph replays
  // may still need. So page numbers are checked before anything is written.
  const bool is_good =
      is_remote ? measure_blocks<true>(to_write, found) : measure_blocks<false>(to_write, found);
  if (!is_good) return int(Left::kAll);
  if (is_remote) to_write.kv_indices = nullptr;  // copied
  Solo team;
  const PlanStatus status = Planner(to_write, team, scratch).run();
  if (status != PlanStatus::kGood) return int(status);
  const bool is_sent = !is_remote || delivery.send(to_write, found.num_blocks, has_pages);
  return int(is_sent ? Left::kNothing : Left::kSending);
}

}  // namespace warploom
