// CTAs of a CUDA kernel on one host thread: a fiber for each thread of a CTA. Fibers take turns at
// barriers and shuffles, in ascending or descending order, so that a missing barrier gives wrong
// results in one of the two.
#pragma once

#include <ucontext.h>

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

static void yield() {
  const unsigned mine = running;
  swapcontext(&contexts[mine], &scheduler);
}

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

static long long exchange(long long value, unsigned from) {
  values[running] = value;
  yield();
  const long long found = values[from];
  yield();
  return found;
}

}  // namespace fibers

static void __syncthreads() { fibers::yield(); }
static long long __shfl_xor_sync(unsigned, long long value, int lanes) {
  return fibers::exchange(value, fibers::running ^ lanes);
}
static long long __shfl_up_sync(unsigned, long long value, int lanes) {
  const unsigned lane = fibers::running % 32;
  return fibers::exchange(value, lane < unsigned(lanes) ? fibers::running : fibers::running - lanes);
}
static long long __shfl_sync(unsigned, long long value, int lane) {
  return fibers::exchange(value, fibers::running / 32 * 32 + lane);
}
