// CTAs of a CUDA kernel on one host thread: a fiber for each thread of each CTA. Fibers run up to a
// barrier or shuffle. In ascending or descending order CTAs follow each other, so that a missing
// barrier gives wrong results in one of the two. In a random order CTAs run by turns, as if at the
// same time, some of them far behind others, as are some of their warps; and copies take their time.
#pragma once

#include <csetjmp>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
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
  bool has_begun, has_ended;
};
static jmp_buf scheduler;
static unsigned running;  // the thread, of the CTA whose turn it is

static std::vector<void (*)()> at_begin;  // of each launch
static bool do_at_begin(void (*action)()) {
  at_begin.push_back(action);
  return true;
}

// What a kernel declares as shared memory: at one address for all CTAs, of which each finds there
// what it has written, for the others' is put aside while it has its turn.
struct Memory {
  char* first;
  std::size_t bytes;
};
static std::vector<Memory> shared;

struct Barrier {
  unsigned arrived, passed;
};

class Cta {
 public:
  std::vector<long long> values;  // what each thread shuffles
  // What each thread waits for, and what happens of itself after what it did.
  std::vector<std::function<bool()>> awaited;
  std::vector<std::deque<std::function<void()>>> pending;
  std::vector<Barrier> barriers;  // one for each warp
  Barrier named[16] = {};

  Cta(unsigned block, unsigned threads, unsigned order, void (*begin)())
      : values(threads),
        awaited(threads),
        pending(threads),
        barriers(threads / 32),
        block_(block),
        order_(order),
        left_(threads),
        stacks_(new char[threads * kStackBytes]),
        fibers_(threads),
        warps_(threads / 32) {
    std::seed_seq seed{order, block};
    random_.seed(seed);
    for (const Memory& memory : shared) aside_.emplace_back(memory.bytes, '\xff');
    for (unsigned t = 0; t < threads; ++t) {
      ucontext_t& context = fibers_[t].begin;
      getcontext(&context);
      context.uc_stack.ss_sp = &stacks_[t * kStackBytes];
      context.uc_stack.ss_size = kStackBytes;
      makecontext(&context, begin, 0);
    }
    std::iota(warps_.begin(), warps_.end(), 0u);
    if (order == kDescending) std::reverse(warps_.begin(), warps_.end());
    for (unsigned warp = 0; warp < warps_.size(); ++warp) lags_.push_back(one_of(kLags, 1));
    turn_ = one_of(kTurns, kMostRounds);
  }

  bool has_ended() const { return left_ == 0; }

  void enter() {
    blockIdx.x = block_;
    for (std::size_t i = 0; i < shared.size(); ++i) {
      std::memcpy(shared[i].first, aside_[i].data(), shared[i].bytes);
    }
  }
  void leave() {
    for (std::size_t i = 0; i < shared.size(); ++i) {
      std::memcpy(aside_[i].data(), shared[i].first, shared[i].bytes);
    }
  }

  // False if all threads that are left wait for ever, or go round.
  bool take_turn() {
    for (unsigned i = 0; i < turn_ && left_ > 0; ++i) {
      if (++rounds_ == kMostRounds) {
        std::fprintf(stderr, "CTA %u goes round, or has too much work: %u rounds\n", block_, rounds_);
        return false;
      }
      if (!run_round()) return false;
    }
    return true;
  }

  void yield() {
    if (_setjmp(fibers_[running].at) == 0) _longjmp(scheduler, 1);
  }
  [[noreturn]] void end() {
    fibers_[running].has_ended = true;
    _longjmp(scheduler, 1);
  }

 private:
  static constexpr std::size_t kStackBytes = 64 * 1024;
  static constexpr unsigned kLags[] = {1, 1, 1, 8, 60};
  static constexpr unsigned kTurns[] = {1, 16, 200};
  static constexpr unsigned kMostRounds = 1 << 20;  // some hundred times what a CTA in tests takes

  template <std::size_t kCount>
  unsigned one_of(const unsigned (&drawn)[kCount], unsigned in_order) {
    return order_ < kFirstSeed ? in_order : drawn[random_() % kCount];
  }

  // Of each warp that does not lag, all threads that can go on.
  bool run_round() {
    if (order_ >= kFirstSeed) std::shuffle(warps_.begin(), warps_.end(), random_);
    bool moved = false;
    for (const unsigned warp : warps_) {
      if (random_() % lags_[warp] == 0) moved |= run_warp(warp);
    }
    const bool happened = let_happen();
    if (moved || happened) return true;
    // Those who lag may be all that can go on.
    for (const unsigned warp : warps_) moved |= run_warp(warp);
    return moved ||
           std::any_of(pending.begin(), pending.end(), [](auto& x) { return !x.empty(); });
  }

  bool run_warp(unsigned warp) {
    bool moved = false;
    const unsigned turn = order_ < kFirstSeed ? (order_ == kDescending ? 31 : 0) : random_() % 32;
    for (unsigned i = 0; i < 32; ++i) {
      const unsigned thread = 32 * warp + (i ^ turn);
      if (fibers_[thread].has_ended || (awaited[thread] && !awaited[thread]())) continue;
      moved = true;
      if (order_ >= kFirstSeed && random_() % 8 == 0) continue;
      awaited[thread] = nullptr;
      running = threadIdx.x = thread;
      resume(fibers_[thread]);
      left_ -= fibers_[thread].has_ended;
    }
    return moved;
  }

  static void resume(Fiber& fiber) {
    if (_setjmp(scheduler) != 0) return;
    if (fiber.has_begun) _longjmp(fiber.at, 1);
    fiber.has_begun = true;
    setcontext(&fiber.begin);
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

  unsigned block_, order_, left_, rounds_ = 0;
  unsigned turn_;  // rounds until another CTA has its turn
  std::mt19937 random_;
  std::unique_ptr<char[]> stacks_;
  std::vector<Fiber> fibers_;
  std::vector<unsigned> warps_, lags_;  // a warp runs in one of so many rounds
  std::vector<std::vector<char>> aside_;
};
static Cta* cta;  // whose turn it is

template <class Ready>
static void wait_until(Ready ready) {
  cta->awaited[running] = ready;
  cta->yield();
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
static void wait_for_warp() { wait(cta->barriers[running / 32], 32); }

// All CTAs; false if the threads of one wait for ever.
template <class Body>
static bool run(unsigned blocks, unsigned threads, unsigned order, Body body) {
  static Body* current;
  current = &body;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (const auto begin : at_begin) begin();
  const auto begin = +[] {
    (*current)();
    cta->end();
  };
  std::vector<std::unique_ptr<Cta>> left;
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned block = order == kDescending ? blocks - 1 - i : i;
    left.push_back(std::make_unique<Cta>(block, threads, order, begin));
  }
  std::mt19937 random(order);
  while (!left.empty()) {
    const auto next = left.begin() + (order < kFirstSeed ? 0 : random() % left.size());
    cta = next->get();
    cta->enter();
    bool goes_on = true;
    do {
      goes_on = cta->take_turn();
    } while (goes_on && left.size() == 1 && !cta->has_ended());
    if (!goes_on) return false;
    cta->leave();
    if (cta->has_ended()) left.erase(next);
  }
  return true;
}

// What thread `from` of the warp gives.
template <class T>
static T exchange(T value, unsigned from) {
  static_assert(sizeof(T) <= sizeof(long long));
  std::memcpy(&cta->values[running], &value, sizeof(T));
  wait_for_warp();
  T found;
  std::memcpy(&found, &cta->values[from], sizeof(T));
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

static void __syncthreads() { fibers::wait(fibers::cta->named[0], blockDim.x); }
static int __syncthreads_or(int value) {
  fibers::cta->values[fibers::running] = value;
  __syncthreads();
  bool found = false;
  for (const long long other : fibers::cta->values) found |= other != 0;
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
