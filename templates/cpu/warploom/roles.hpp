// Kernels of several roles: each item is computed with the tile of the role that it names.
#pragma once

#include <warploom/role_lists.hpp>
#include <warploom/threads.hpp>

namespace warploom {

// The kernels of all roles, in the order of the plan's; what they have in common is the first's.
template <class First, class... Others>
struct Roles : First {
  static constexpr int kRoles = 1 + static_cast<int>(sizeof...(Others));
};

// A thread mostly keeps to one role, and never touches the memory of others then.
template <class... Ks>
struct Worker<Roles<Ks...>> : Worker<Ks>... {
  using K = Roles<Ks...>;

  static int rows(const typename K::Params& p, const typename K::WorkItem& item,
                  const typename K::Segment& segment) {
    int role = 0, rows = 0;
    ((role++ == item.role ? void(rows = Worker<Ks>::rows(p, item, segment)) : void()), ...);
    return rows;
  }
  void run(const typename K::Params& p, int index) {
    const int own = load_record<typename K::WorkItem>(p.items, index).role;
    int role = 0;
    ((role++ == own ? Worker<Ks>::run(p, index) : void()), ...);
  }
};

// Each list is a unit of work like any other: those of each role, and those that a GPU's CTAs
// claim. A limit of CTAs is one of threads.
template <class K>
int run_roles(const typename K::Params& p, int num_ctas, int num_threads) noexcept {
  const int active = load_record<typename K::PlanHeader>(p.header, 0).num_active;
  return run_kernel<K>(p, kRoleLists * num_ctas, min_int(num_threads, active));
}

}  // namespace warploom
