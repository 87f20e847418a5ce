// A team of the threads of a CTA: how a device runs the planner.
#pragma once

#include <warploom/variant.cuh>

namespace warploom {

class PlannerTeam {
 public:
  static constexpr bool kIsMeasured = false;            // nobody has looked at the pages
  static constexpr int kBytes = 2 * 32 * sizeof(wide);  // of shared memory

  WL_FN explicit PlannerTeam(char* memory) : sums_(reinterpret_cast<wide*>(memory)) {}

  WL_FN static int share(int count, int members) { return (count + members - 1) / members; }
  WL_FN static Range nth(int index, int size, int count) {
    return {min(index * size, count), min((index + 1) * size, count)};
  }
  WL_FN Range range(int count) const { return nth(threadIdx.x, share(count, blockDim.x), count); }
  WL_FN Range part(int count) const {
    const int members = blockDim.x * gridDim.x;
    return nth(blockIdx.x * blockDim.x + threadIdx.x, share(count, members), count);
  }
  WL_FN bool is_first() const { return threadIdx.x == 0; }
  WL_FN bool is_first_of_all() const { return threadIdx.x == 0 && blockIdx.x == 0; }
  WL_FN void sync() const { __syncthreads(); }

  WL_FN wide max(wide value) {
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      value = warploom::max(value, __shfl_xor_sync(~0u, value, lanes));
    }
    wide* const shared = next_sums();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : value;
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      value = warploom::max(value, __shfl_xor_sync(~0u, value, lanes));
    }
    return value;
  }

  WL_FN static wide up_to(wide value) {  // inclusive sum over a warp
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const wide below = __shfl_up_sync(~0u, value, lanes);
      value += int(threadIdx.x % 32) >= lanes ? below : 0;
    }
    return value;
  }

  WL_FN wide before(wide value, wide& total) {
    const wide mine = up_to(value);
    wide* const shared = next_sums();
    if (threadIdx.x % 32 == 31) shared[threadIdx.x / 32] = mine;
    __syncthreads();
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const wide warp_sums = up_to(lane < warps ? shared[lane] : 0);
    total = __shfl_sync(~0u, warp_sums, 31);
    const wide before_warp = __shfl_sync(~0u, warp_sums, warp == 0 ? 0 : warp - 1);
    return mine - value + (warp == 0 ? 0 : before_warp);
  }

  // Bitonic; there is room up to the next power of two. Values differ.
  WL_FN const wide* sort(wide* values, int count) {
    int size = 1;
    while (size < count) size *= 2;
    if (size <= int(blockDim.x)) {
      sort_one_each(values, count, size);
    } else {
      sort_in_memory(values, count, size);
    }
    return values;
  }

 private:
  // Two sets take turns, so that one barrier is enough.
  WL_FN wide* next_sums() { return sums_ + 32 * (turn_ ^= 1); }

  static constexpr wide kLast = 0x7fffffffffffffffll;

  // Each thread holds a value; partners within a warp meet by shuffles.
  WL_FN void sort_one_each(wide* values, int count, int size) {
    const int i = threadIdx.x;
    __syncthreads();
    wide value = i < count ? values[i] : kLast;
    for (int run = 2; run <= size; run *= 2) {
      for (int stride = run / 2; stride > 0; stride /= 2) {
        wide other;
        if (stride < 32) {
          other = __shfl_xor_sync(~0u, value, stride);
        } else {
          __syncthreads();
          if (i < size) values[i] = value;
          __syncthreads();
          other = i < size ? values[i ^ stride] : value;
        }
        const bool keeps_less = ((i & run) == 0) == ((i & stride) == 0);
        value = (value < other) == keeps_less ? value : other;
      }
    }
    __syncthreads();
    if (i < size) values[i] = value;
    __syncthreads();
  }

  WL_FN void sort_in_memory(wide* values, int count, int size) {
    for (int i = count + threadIdx.x; i < size; i += blockDim.x) values[i] = kLast;
    for (int run = 2; run <= size; run *= 2) {
      for (int stride = run / 2; stride > 0; stride /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < size; i += blockDim.x) {
          const int partner = i ^ stride;
          const bool rises = (i & run) == 0;
          if (partner > i && (values[i] > values[partner]) == rises) {
            const wide value = values[i];
            values[i] = values[partner];
            values[partner] = value;
          }
        }
      }
    }
    __syncthreads();
  }

  wide* sums_;
  int turn_ = 0;
};

}  // namespace warploom
