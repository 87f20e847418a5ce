// When each work item ran, in kernels that are made to tell it (WARPLOOM_TRACE): their Params have
// a place for it (codegen/abi.py).
#pragma once

#include <chrono>

namespace warploom {

// Lives as long as a thread works on an item. Other kernels have none of it.
template <class K, class = void>
class Stamp {
 public:
  Stamp(const typename K::Params& /*p*/, int /*index*/, int /*cta*/, int /*thread*/) {}
};

template <class K>
class Stamp<K, decltype(void(&K::Params::stamps))> {
 public:
  Stamp(const typename K::Params& p, int index, int cta, int thread) : stamp_(p.stamps[index]) {
    stamp_.cta = cta;
    stamp_.sm = thread;
    stamp_.begin = nanoseconds();
  }
  ~Stamp() { stamp_.end = nanoseconds(); }
  Stamp(const Stamp&) = delete;
  Stamp& operator=(const Stamp&) = delete;

 private:
  static long long nanoseconds() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
  }

  decltype(*K::Params::stamps) stamp_;
};

}  // namespace warploom
