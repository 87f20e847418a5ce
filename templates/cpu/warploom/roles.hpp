// Kernels of several roles: each item is computed with the tile of its role.
#pragma once

#include <warploom/threads.hpp>

namespace warploom {

// The kernels of all roles, in the order of the plan's; what they have in common is the first's.
template <class First, class... Others>
struct Roles : First {
  static constexpr int kRoles = 1 + static_cast<int>(sizeof...(Others));
};

// A thread mostly keeps to one role, and never touches the memory of others then.
template <class First, class... Others>
struct Worker<Roles<First, Others...>> : Worker<First>, Worker<Others>... {
  using K = Roles<First, Others...>;

  // That of the fewest rows which holds all of the item's, where it does not say its role.
  static int role_of(const typename K::WorkItem& item) {
    if constexpr (K::Config::kComposed) {
      return (0 + ... + (item.rows <= Others::Config::kRows ? 1 : 0));
    } else {
      return item.role;
    }
  }
  static int rows(const typename K::Params& p, const typename K::WorkItem& item,
                  const typename K::Segment& segment) {
    const int own = role_of(item);
    int role = 0, rows = Worker<First>::rows(p, item, segment);
    ((++role == own ? void(rows = Worker<Others>::rows(p, item, segment)) : void()), ...);
    return rows;
  }
  void run(const typename K::Params& p, int index) {
    const int own = role_of(load_record<typename K::WorkItem>(p.items, index));
    if (own == 0) return Worker<First>::run(p, index);
    int role = 0;
    ((++role == own ? Worker<Others>::run(p, index) : void()), ...);
  }
  void merge_rows(const typename K::Params& p, std::atomic<int>& next) {
    Worker<First>::merge_rows(p, next);
  }
};

// Each list is a unit of work like any other: those of each role, and those that a GPU's CTAs
// claim. A limit of CTAs is one of threads.
template <class K>
int run_roles(const typename K::Params& p, int num_ctas, int num_threads) noexcept {
  using Header = typename K::PlanHeader;
  const int active = load_record<Header>(p.header, 0).num_active;
  return run_kernel<K>(p, Header::kRoleLists * num_ctas, min_int(num_threads, active));
}

}  // namespace warploom
