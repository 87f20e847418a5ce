// Items over threads: each takes those of a CTA, one at a time, and whoever is free helps with the
// others', so late or missing threads cost only time.
#pragma once

#include <atomic>
#include <memory>
#include <new>
#include <thread>

#include <warploom/attention.hpp>
#include <warploom/stamp.hpp>

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

// Hands out items: a thread keeps to its CTA, whose items often share keys that it then has in its
// cache, goes on to a CTA that nobody began, and last helps the others, whose shortest items
// remain.
class Queue {
 public:
  Queue(const int* cta_indptr, int num_ctas)
      : indptr_(cta_indptr),
        num_ctas_(num_ctas),
        next_(new (std::nothrow) std::atomic<int>[static_cast<std::size_t>(num_ctas)]) {
    for (int cta = 0; cta < num_ctas && next_ != nullptr; ++cta) next_[cta] = indptr_[cta];
  }
  bool is_ready() const { return next_ != nullptr; }

  // The index of an item, or -1 when none is left; `cta`, at first -1, is the thread's own.
  int take(int& cta) {
    int item = cta < 0 ? -1 : take_from(cta);
    while (item < 0 && begun_.load(std::memory_order_relaxed) < num_ctas_) {
      cta = begun_.fetch_add(1, std::memory_order_relaxed);
      if (cta < num_ctas_) item = take_from(cta);
    }
    for (int other = 0; item < 0 && other < num_ctas_; ++other) item = take_from(cta = other);
    return item;
  }

 private:
  int take_from(int cta) {
    if (cta >= num_ctas_ || next_[cta].load(std::memory_order_relaxed) >= indptr_[cta + 1])
      return -1;
    const int item = next_[cta].fetch_add(1, std::memory_order_relaxed);
    return item < indptr_[cta + 1] ? item : -1;
  }

  const int* indptr_;
  int num_ctas_;
  std::unique_ptr<std::atomic<int>[]> next_;
  std::atomic<int> begun_{0};
};

// Composed plans: rows whose keys lie in several parts, a tile at a time, when all items are done.
template <class K>
void run_row_merges(const typename K::Params& p, std::atomic<int>& next, States<K>& states) {
  constexpr int kRows = K::Config::kRows;
  const int total = load_record<typename K::PlanHeader>(p.header, 0).num_merges;
  for (int first = next.fetch_add(kRows); first < total; first = next.fetch_add(kRows)) {
    merge_composed_rows(Item<K>(p, first, min_int(kRows, total - first)), first, states);
  }
}

// What a thread computes items with.
template <class K>
struct Worker {
  Scratch<K> scratch;

  static int rows(const typename K::Params& p, const typename K::WorkItem& item,
                  const typename K::Segment& segment) {
    return rows_of<K>(p, item, segment);
  }
  void run(const typename K::Params& p, int index) {
    const Item<K> item(p, index);
    Attention<K>(item, scratch).run();
  }
  void merge_rows(const typename K::Params& p, std::atomic<int>& next) {
    run_row_merges<K>(p, next, scratch.states);
  }
};

enum Status : int { kDone = 0, kOutOfMemory = 1 };

inline constexpr int kMaxThreads = 256;
// Multiply-adds that are worth a thread: starting one costs about 20 microseconds.
inline constexpr long long kThreadWork = 8 << 20;

// How many threads the plan's work is worth; rows are counted with what a key costs by itself. A
// limit of CTAs is one of threads, though they take items of any CTA.
template <class K>
int useful_threads(const typename K::Params& p, int num_ctas, int num_threads) {
  int busy = 0;
  for (int cta = 0; cta < num_ctas; ++cta) busy += p.cta_indptr[cta] < p.cta_indptr[cta + 1];
  const int most = min_int(min_int(num_threads, busy), kMaxThreads);
  const int num_items = num_ctas > 0 ? p.cta_indptr[num_ctas] : 0;
  constexpr int kDims = K::Config::kHeadDimQk + K::Config::kHeadDimV;
  long long work = 0;
  for (int i = 0; i < num_items && work < most * kThreadWork; ++i) {
    const auto item = load_record<typename K::WorkItem>(p.items, i);
    const auto segment = load_record<typename K::Segment>(p.segments, item.segment);
    const int rows = Worker<K>::rows(p, item, segment);
    work += static_cast<long long>(item.kv_end - item.kv_begin) * (rows + 16) * kDims;
  }
  return max_int(1, min_int(most, static_cast<int>(work / kThreadWork)));
}

// Runs all items on up to `num_threads` threads, the caller being one of them.
template <class K>
int run_kernel(const typename K::Params& p, int num_ctas, int num_threads) noexcept {
  const int num_items = num_ctas > 0 ? p.cta_indptr[num_ctas] : 0;
  Queue queue(p.cta_indptr, num_ctas);
  if (!queue.is_ready()) return kOutOfMemory;
  std::atomic<int> working{0}, done{0}, merged{0};
  auto work = [&]() noexcept {
    Worker<K>* worker = new (std::nothrow) Worker<K>;
    if (worker == nullptr) return;
    const int number = working.fetch_add(1);
    const typename Shape<K>::Registers registers{};
    int cta = -1;
    for (int i = queue.take(cta); i >= 0; i = queue.take(cta)) {
      const Stamp<K> stamp(p, i, cta, number);
      worker->run(p, i);
      done.fetch_add(1);
    }
    if constexpr (K::Config::kComposed) {
      while (done.load() < num_items) std::this_thread::yield();
      worker->merge_rows(p, merged);
    }
    delete worker;
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
