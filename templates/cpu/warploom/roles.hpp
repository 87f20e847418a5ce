// Kernels of several roles: each item is computed with the tile of the role that it names.
#pragma once

#include <warploom/threads.hpp>

namespace warploom {

// The kernels of all roles, in the order of the plan's; what they have in common is the first's.
template <class First, class... Others>
struct Roles : First {};

// Calls f with the kernel of a role, as a null pointer of its type.
template <class... Ks, class F>
WL_INLINE void with_role(int role, const F& f) {
  int number = 0;
  const auto offer = [&](auto* kernel) {
    if (number++ == role) f(kernel);
  };
  (offer(static_cast<Ks*>(nullptr)), ...);
}

// A thread mostly keeps to one role, and never touches the memory of others then.
template <class... Ks>
struct Worker<Roles<Ks...>> : Worker<Ks>... {
  using K = Roles<Ks...>;

  static int rows(const typename K::Params& p, const typename K::WorkItem& item,
                  const typename K::Segment& segment) {
    int rows = 0;
    with_role<Ks...>(item.role, [&](auto* kernel) {
      rows = Worker<std::remove_pointer_t<decltype(kernel)>>::rows(p, item, segment);
    });
    return rows;
  }
  void run(const typename K::Params& p, int index) {
    const int role = load_record<typename K::WorkItem>(p.items, index).role;
    with_role<Ks...>(role, [&](auto* kernel) {
      Worker<std::remove_pointer_t<decltype(kernel)>>::run(p, index);
    });
  }
};

}  // namespace warploom
