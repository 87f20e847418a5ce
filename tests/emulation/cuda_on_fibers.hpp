// CTAs of a CUDA kernel on one host thread, one CTA after the other: a fiber for each thread of a
// CTA. Fibers run up to a barrier or shuffle, in ascending or descending order, so that a missing
// barrier gives wrong results in one of the two.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstring>
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

static ucontext_t scheduler;
static std::vector<ucontext_t> contexts;
static std::vector<long long> values;  // what each thread shuffles
static unsigned running;

struct Barrier {
  unsigned arrived, passed;
};
static std::vector<Barrier> barriers;  // one for each warp, one for some threads, one for all

static void yield() {
  const unsigned mine = running;
  swapcontext(&contexts[mine], &scheduler);
}

static void wait(Barrier& barrier, unsigned threads) {
  const unsigned passed = barrier.passed;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.passed;
  }
  while (barrier.passed == passed) yield();
}
static void wait_for_warp() { wait(barriers[running / 32], 32); }

template <class Body>
static void run(unsigned blocks, unsigned threads, bool descending, Body body) {
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
    barriers.assign(threads / 32 + 2, {});
    finished.assign(threads, 0);
    for (unsigned t = 0; t < threads; ++t) {
      getcontext(&contexts[t]);
      contexts[t].uc_stack.ss_sp = stacks[t].data();
      contexts[t].uc_stack.ss_size = stacks[t].size();
      contexts[t].uc_link = &scheduler;
      makecontext(
          &contexts[t],
          +[] {
            (*current)();
            finished[running] = 1;
          },
          0);
    }
    for (unsigned left = threads; left > 0;) {
      for (unsigned i = 0; i < threads; ++i) {
        running = threadIdx.x = descending ? threads - 1 - i : i;
        if (finished[running]) continue;
        swapcontext(&scheduler, &contexts[running]);
        left -= finished[running];
      }
    }
  }
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

static void __syncthreads() { fibers::wait(fibers::barriers.back(), blockDim.x); }
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
