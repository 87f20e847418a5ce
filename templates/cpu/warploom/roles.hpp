// Kernels of several roles: each item is computed with the tile of the role that it names.
#pragma once

#include <warploom/threads.hpp>

namespace warploom {

// The kernels of all roles, in the order of the plan's; what they have in common is the first's.
template <class First, class... Others>
struct Roles : First {};

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

}  // namespace warploom
