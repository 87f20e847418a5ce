// CTAs of a CUDA kernel on one host thread, one CTA after the other: a fiber for each thread of a
// CTA. Fibers run up to a barrier or shuffle; in ascending or descending order, so that a missing
// barrier gives wrong results in one of the two, or in random order, where some warps lag far
// behind others and copies take their time.
#pragma once

#include <csetjmp>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Dim {
  unsigned x;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace fibers {

enum Order : unsigned { kAscending, kDescending, kFirstSeed };  // or a random one, by its seed

// A fiber begins as a context with a stack of its own. From then on threads change by jumps, which,
// unlike `swapcontext`, do not ask the system for the signal mask each time.
struct Fiber {
  ucontext_t begin;
  jmp_buf at;
  bool has_begun;
};
static jmp_buf scheduler;
static std::vector<Fiber> contexts;
static std::vector<long long> values;  // what each thread shuffles
static unsigned running;
// What each thread waits for, and what happens of itself after what it did.
static std::vector<std::function<bool()>> awaited;
static std::vector<std::deque<std::function<void()>>> pending;
static std::vector<void (*)()> at_begin;  // of each CTA
static bool do_at_begin(void (*action)()) {
  at_begin.push_back(action);
  return true;
}

struct Barrier {
  unsigned arrived, passed;
};
static std::vector<Barrier> barriers;  // one for each warp
static Barrier named[16];

static void yield() {
  if (_setjmp(contexts[running].at) == 0) _longjmp(scheduler, 1);
}

static void resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.has_begun) _longjmp(fiber.at, 1);
  fiber.has_begun = true;
  setcontext(&fiber.begin);
}

template <class Ready>
static void wait_until(Ready ready) {
  awaited[running] = ready;
  yield();
}

static void arrive(Barrier& barrier, unsigned threads) {
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.passed;
  }
}
static void wait(Barrier& barrier, unsigned threads) {
  const unsigned passed = barrier.passed;
  arrive(barrier, threads);
  if (barrier.passed == passed) wait_until([&barrier, passed] { return barrier.passed != passed; });
}
static void wait_for_warp() { wait(barriers[running / 32], 32); }

// One CTA's threads from first to last; false if all that are left wait for ever, or go round.
class Cta {
 public:
  Cta(unsigned threads, unsigned order, std::vector<char>& finished)
      : order_(order), random_(order), finished_(finished), left_(threads), warps_(threads / 32) {
    std::iota(warps_.begin(), warps_.end(), 0u);
    if (order == kDescending) std::reverse(warps_.begin(), warps_.end());
    for (unsigned warp = 0; warp < warps_.size(); ++warp) {
      lags_.push_back(order < kFirstSeed ? 1 : kLags[random_() % std::size(kLags)]);
    }
  }

  bool run() {
    for (unsigned round = 0; left_ > 0; ++round) {
      if (round == kMostRounds) return false;
      if (order_ >= kFirstSeed) std::shuffle(warps_.begin(), warps_.end(), random_);
      bool moved = false;
      for (const unsigned warp : warps_) {
        if (random_() % lags_[warp] == 0) moved |= run_warp(warp);
      }
      const bool happened = let_happen();
      if (moved || happened) continue;
      // Those who lag may be all that can go on.
      for (const unsigned warp : warps_) moved |= run_warp(warp);
      if (!moved &&
          std::all_of(pending.begin(), pending.end(), [](auto& x) { return x.empty(); })) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr unsigned kLags[] = {1, 1, 1, 8, 60};
  static constexpr unsigned kMostRounds = 1 << 20;  // some hundred times what a CTA in tests takes

  bool run_warp(unsigned warp) {
    bool moved = false;
    const unsigned turn = order_ < kFirstSeed ? (order_ == kDescending ? 31 : 0) : random_() % 32;
    for (unsigned i = 0; i < 32; ++i) {
      const unsigned thread = 32 * warp + (i ^ turn);
      if (finished_[thread] || (awaited[thread] && !awaited[thread]())) continue;
      moved = true;
      if (order_ >= kFirstSeed && random_() % 8 == 0) continue;
      awaited[thread] = nullptr;
      running = threadIdx.x = thread;
      resume(contexts[thread]);
      left_ -= finished_[thread];
    }
    return moved;
  }

  bool let_happen() {
    bool happened = false;
    for (auto& of_thread : pending) {
      if (of_thread.empty() || (order_ >= kFirstSeed && random_() % 4 != 0)) continue;
      for (const auto& event : of_thread) event();
      of_thread.clear();
      happened = true;
    }
    return happened;
  }

  unsigned order_;
  std::mt19937 random_;
  std::vector<char>& finished_;
  unsigned left_;
  std::vector<unsigned> warps_, lags_;  // a warp runs in one of so many rounds
};

// All CTAs; false if the threads of one wait for ever.
template <class Body>
static bool run(unsigned blocks, unsigned threads, unsigned order, Body body) {
  static Body* current;
  static std::vector<char> finished;
  current = &body;
  gridDim.x = blocks;
  blockDim.x = threads;
  std::vector<std::vector<char>> stacks(threads, std::vector<char>(64 * 1024));
  for (unsigned block = 0; block < blocks; ++block) {
    blockIdx.x = block;
    contexts.assign(threads, {});
    values.assign(threads, 0);
    awaited.assign(threads, nullptr);
    pending.assign(threads, {});
    barriers.assign(threads / 32, {});
    std::fill(std::begin(named), std::end(named), Barrier{});
    finished.assign(threads, 0);
    for (const auto begin : at_begin) begin();
    for (unsigned t = 0; t < threads; ++t) {
      ucontext_t& begin = contexts[t].begin;
      getcontext(&begin);
      begin.uc_stack.ss_sp = stacks[t].data();
      begin.uc_stack.ss_size = stacks[t].size();
      makecontext(
          &begin,
          +[] {
            (*current)();
            finished[running] = 1;
            _longjmp(scheduler, 1);
          },
          0);
    }
    if (!Cta(threads, order, finished).run()) return false;
  }
  return true;
}

// What thread `from` of the warp gives.
template <class T>
static T exchange(T value, unsigned from) {
  static_assert(sizeof(T) <= sizeof(long long));
  std::memcpy(&values[running], &value, sizeof(T));
  wait_for_warp();
  T found;
  std::memcpy(&found, &values[from], sizeof(T));
  wait_for_warp();
  return found;
}

// A reduction over the warp.
template <class T, class Join>
static T reduce(T value, Join join) {
  for (unsigned lanes = 16; lanes > 0; lanes /= 2) {
    value = join(value, exchange(value, running ^ lanes));
  }
  return value;
}

}  // namespace fibers

static void __syncthreads() { fibers::wait(fibers::named[0], blockDim.x); }
static int __syncthreads_or(int value) {
  fibers::values[fibers::running] = value;
  __syncthreads();
  bool found = false;
  for (const long long other : fibers::values) found |= other != 0;
  __syncthreads();
  return found;
}
template <class T>
static T __shfl_xor_sync(unsigned, T value, int lanes) {
  return fibers::exchange(value, fibers::running ^ lanes);
}
template <class T>
static T __shfl_up_sync(unsigned, T value, int lanes) {
  const unsigned lane = fibers::running % 32;
  return fibers::exchange(value,
                          lane < unsigned(lanes) ? fibers::running : fibers::running - lanes);
}
template <class T>
static T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  return fibers::exchange(value, fibers::running / width * width + lane % width);
}
