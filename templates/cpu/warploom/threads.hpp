// CTAs over threads: whoever is free takes the next one, so late or missing threads cost only time.
#pragma once

#include <atomic>
#include <new>
#include <thread>

#include <warploom/attention.hpp>

namespace warploom {

template <class K>
void run_cta(const typename K::Params& p, int cta, Scratch<K>& scratch) {
  for (int i = p.cta_indptr[cta]; i < p.cta_indptr[cta + 1]; ++i) {
    const Item<K> item(p, i);
    Attention<K>(item, scratch).run();
  }
}

enum Status : int { kDone = 0, kOutOfMemory = 1 };

// Runs all CTAs on up to `num_threads` threads, the caller being one of them.
template <class K>
int run_kernel(const typename K::Params& p, int num_ctas, int num_threads) noexcept {
  std::atomic<int> next{0}, working{0};
  auto work = [&]() noexcept {
    Scratch<K>* scratch = new (std::nothrow) Scratch<K>;
    if (scratch == nullptr) return;
    working.fetch_add(1);
    for (int cta = next.fetch_add(1); cta < num_ctas; cta = next.fetch_add(1)) {
      run_cta<K>(p, cta, *scratch);
    }
    delete scratch;
  };
  const int helpers = min_int(min_int(num_threads, num_ctas) - 1, 255);
  std::thread threads[255];
  int started = 0;
  try {
    while (started < helpers) {
      threads[started] = std::thread(work);
      ++started;
    }
  } catch (...) {  // the system gives no more threads: those that run do all the work
  }
  work();
  for (int i = 0; i < started; ++i) threads[i].join();
  return working.load() > 0 || num_ctas == 0 ? kDone : kOutOfMemory;
}

}  // namespace warploom
