// CTAs over threads: whoever is free takes the next one, so late or missing threads cost only time.
#pragma once

#include <atomic>
#include <new>
#include <thread>

#include <warploom/attention.hpp>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace warploom {

// A thread that starts while all cores are busy, as with workers of OpenMP that spin after their
// last loop, may be queued behind the thread that made it and get nothing done: send it to another
// core.
inline void keep_off_this_core(std::thread& thread) {
#if defined(__linux__)
  cpu_set_t cores;
  const int here = sched_getcpu();
  if (here < 0 || sched_getaffinity(0, sizeof(cores), &cores) != 0) return;
  CPU_CLR(here, &cores);
  if (CPU_COUNT(&cores) == 0) return;
  pthread_setaffinity_np(thread.native_handle(), sizeof(cores), &cores);
#else
  (void)thread;
#endif
}

template <class K>
void run_cta(const typename K::Params& p, int cta, Scratch<K>& scratch) {
  for (int i = p.cta_indptr[cta]; i < p.cta_indptr[cta + 1]; ++i) {
    const Item<K> item(p, i);
    Attention<K>(item, scratch).run();
  }
}

// Composed plans: rows whose keys lie in several parts, a tile at a time, when all CTAs are done.
template <class K>
void run_joins(const typename K::Params& p, std::atomic<int>& next, States<K>& states) {
  constexpr int kRows = K::Config::kRows;
  const int total = load_record<typename K::PlanHeader>(p.header, 0).num_merges;
  for (int first = next.fetch_add(kRows); first < total; first = next.fetch_add(kRows)) {
    join_rows(Item<K>(p, first, min_int(kRows, total - first)), first, states);
  }
}

enum Status : int { kDone = 0, kOutOfMemory = 1 };

inline constexpr int kMaxThreads = 256;
// Multiply-adds that are worth a thread: starting one costs about 20 microseconds.
inline constexpr long long kThreadWork = 8 << 20;

// How many threads the plan's work is worth; rows are counted with what a key costs by itself.
template <class K>
int useful_threads(const typename K::Params& p, int num_ctas, int num_threads) {
  const int most = min_int(min_int(num_threads, num_ctas), kMaxThreads);
  const int num_items = num_ctas > 0 ? p.cta_indptr[num_ctas] : 0;
  constexpr int kDims = K::Config::kHeadDimQk + K::Config::kHeadDimV;
  long long work = 0;
  for (int i = 0; i < num_items && work < most * kThreadWork; ++i) {
    const auto item = load_record<typename K::WorkItem>(p.items, i);
    const auto segment = load_record<typename K::Segment>(p.segments, item.segment);
    const int rows = rows_of<K>(p, item, segment);
    work += static_cast<long long>(item.kv_end - item.kv_begin) * (rows + 16) * kDims;
  }
  return max_int(1, min_int(most, static_cast<int>(work / kThreadWork)));
}

// Runs all CTAs on up to `num_threads` threads, the caller being one of them.
template <class K>
int run_kernel(const typename K::Params& p, int num_ctas, int num_threads) noexcept {
  std::atomic<int> next{0}, working{0}, done{0}, joined{0};
  auto work = [&]() noexcept {
    Scratch<K>* scratch = new (std::nothrow) Scratch<K>;
    if (scratch == nullptr) return;
    working.fetch_add(1);
    const typename Shape<K>::Registers registers{};
    for (int cta = next.fetch_add(1); cta < num_ctas; cta = next.fetch_add(1)) {
      run_cta<K>(p, cta, *scratch);
      done.fetch_add(1);
    }
    if constexpr (K::Config::kComposed) {
      while (done.load() < num_ctas) std::this_thread::yield();
      run_joins<K>(p, joined, scratch->states);
    }
    delete scratch;
  };
  const int helpers = useful_threads<K>(p, num_ctas, num_threads) - 1;
  std::thread threads[kMaxThreads];
  int started = 0;
  try {
    while (started < helpers) {
      threads[started] = std::thread(work);
      keep_off_this_core(threads[started++]);
    }
  } catch (...) {  // the system gives no more threads: those that run do all the work
  }
  work();
  for (int i = 0; i < started; ++i) threads[i].join();
  return working.load() > 0 ? kDone : kOutOfMemory;
}

}  // namespace warploom
