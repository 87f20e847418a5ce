// A team of the threads of a CTA: how a device runs the planner.
#pragma once

#include <warploom/device/warp.cuh>
#include <warploom/variant.cuh>

namespace warploom {

class PlannerTeam {
 public:
  static constexpr bool kIsHost = false;
  static constexpr int kMostGroups = 32;  // of `max_of_each`: what a set of sums has room for
  static constexpr int kBytes = (2 * 32 + 2) * sizeof(wide);  // of shared memory

  // `votes` is one number for all teams: zero between launches.
  WL_FN PlannerTeam(char* memory, int* votes)
      : sums_(reinterpret_cast<wide*>(memory)), votes_(reinterpret_cast<unsigned*>(votes)) {}

  // The part of this thread: neighbours in order, most often one or none.
  WL_FN Range range(int count) const {
    int size = 1;  // found without a division, which is 20 instructions
    while (size * int(blockDim.x) < count) ++size;
    const int begin = threadIdx.x * size;
    return {min(begin, count), min(begin + size, count)};
  }
  // Not unrolled, and so most loops below: few pass twice, and code that runs once must be fetched.
  template <class Step>
  WL_FN static void each(Range range, const Step& step) {
#pragma unroll 1
    for (int i = range.begin; i < range.end; ++i) step(i);
  }
  // The same among all teams, warp by warp, from the warp on that comes after `behind` others.
  template <class Step>
  WL_FN static void each_of_all(int count, const Step& step, int behind = 0) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll 1
    for (int i = (warp * gridDim.x + blockIdx.x) * 32 + lane - behind; i < count;
         i += gridDim.x * blockDim.x) {
      if (i >= 0) step(i);
    }
  }
  // Calls step(i, lines) for all i < count, with some of the lines in each call.
  template <class Step>
  WL_FN static void each_line(int count, int lines, const Step& step, int behind = 0) {
    const auto each = [&](int at) {
      const int i = at / lines, line = at - i * lines;
      step(i, Range{line, line + 1});
    };
    each_of_all(count * lines, each, behind * lines);
  }

  WL_FN bool is_first() const { return threadIdx.x == 0; }
  WL_FN bool is_first_team() const { return blockIdx.x == 0; }
  WL_FN void sync() const { __syncthreads(); }
  WL_FN bool any(bool value) const { return __syncthreads_or(value) != 0; }

  // The sum of the threads before, and of all.
  WL_FN wide before(wide value, wide& total) {
    const wide mine = up_to(value);
    wide* const shared = next_sums();
    const int warps = blockDim.x / kWarpSize, lane = threadIdx.x % kWarpSize,
              warp = threadIdx.x / kWarpSize;
    if (lane == 31) shared[warp] = mine;
    __syncthreads();
    const wide warp_sums = up_to(lane < warps ? shared[lane] : 0);
    total = __shfl_sync(kAllLanes, warp_sums, 31);
    const wide before_warp = __shfl_sync(kAllLanes, warp_sums, warp == 0 ? 0 : warp - 1);
    return mine - value + (warp == 0 ? 0 : before_warp);
  }

  // The greatest value(group, 0 .. count - 1) of each group, or 0. A warp works on a group.
  template <class Value>
  WL_FN const wide* max_of_each(int groups, int count, const Value& value) {
    wide* const found = next_sums();
#pragma unroll 1
    for (int group = threadIdx.x / kWarpSize; group < groups; group += blockDim.x / kWarpSize) {
      wide most = 0;
#pragma unroll 1
      for (int i = threadIdx.x % kWarpSize; i < count; i += kWarpSize)
        most = max(most, value(group, i));
#pragma unroll 1
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        most = max(most, __shfl_xor_sync(kAllLanes, most, lanes));
      }
      if (threadIdx.x % kWarpSize == 0) found[group] = most;
    }
    __syncthreads();
    return found;
  }

  // Sorts by the upper halves, of which equal ones keep their order, and none is the greatest int;
  // there is room for as many more behind. The place of a value is how many belong before it: first
  // among 32, then in runs twice as long, where a search counts those of the other run.
  WL_FN const wide* sort(wide* from, int count) {
    __syncthreads();
    bool falls = false;
#pragma unroll 1
    for (int i = threadIdx.x + 1; i < count; i += blockDim.x) {
      falls |= upper(from[i - 1]) > upper(from[i]);
    }
    if (!any(falls)) return from;
    wide* to = from + count;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const wide value = from[i];
      const int first = i & -32, last = min(first + 32, count);
      int place = first;
#pragma unroll 8
      for (int j = first; j < last; ++j) place += upper(from[j]) < upper(value) + (j < i);
      to[place] = value;
    }
#pragma unroll 1
    for (int run = 32; run < count; run *= 2) {
      __syncthreads();
      wide* const sorted = to;
      to = from;
      from = sorted;
      merge_runs(from, to, count, run);
    }
    __syncthreads();
    return to;
  }

  // Copies a part of a list; true if this thread has seen a negative number.
  WL_FN static bool copy(const int* from, int* to, int count) {
    const auto places =
        reinterpret_cast<unsigned long long>(from) | reinterpret_cast<unsigned long long>(to);
    const int quads = places % sizeof(int4) == 0 ? count / 4 : 0;
    bool found = false;
    each_of_all(quads, [&](int i) {
      const int4 values = reinterpret_cast<const int4*>(from)[i];
      found |= (values.x | values.y | values.z | values.w) < 0;
      reinterpret_cast<int4*>(to)[i] = values;
    });
    each_of_all(count - 4 * quads, [&](int i) {
      const int value = from[4 * quads + i];
      found |= value < 0;
      to[4 * quads + i] = value;
    });
    return found;
  }

  // Nobody waits for the other teams: each votes when it can, and the last to vote knows all votes.
  // The lower half counts teams, the upper half threads that object. Neither overflows: a launch
  // has 32 teams of 1024 threads at most (runtime/strategies/device_strategy.py).
  WL_FN void vote(bool objects) {
    if (objects) atomicAdd(votes_, 1u << 16);
    __syncthreads();
    if (threadIdx.x == 0) seen_ = atomicAdd(votes_, 1u);
  }
  // True in the team that voted last; it takes the votes back.
  WL_FN bool is_last(bool& is_objected) {
    unsigned* const shared = reinterpret_cast<unsigned*>(sums_ + 2 * 32);
    if (threadIdx.x == 0) {
      const unsigned teams = seen_ % (1u << 16) + 1, objections = seen_ >> 16;
      shared[0] = teams == gridDim.x;
      shared[1] = objections;
      if (teams == gridDim.x) atomicAdd(votes_, 0u - (objections << 16) - gridDim.x);
    }
    __syncthreads();
    is_objected = shared[1] != 0;
    return shared[0] != 0;
  }

 private:
  // Two sets take turns, so that one barrier is enough.
  WL_FN wide* next_sums() { return sums_ + 32 * (turn_ ^= 1); }

  WL_FN static wide up_to(wide value) {  // inclusive sum over a warp
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const wide below = __shfl_up_sync(kAllLanes, value, lanes);
      value += int(threadIdx.x % kWarpSize) >= lanes ? below : 0;
    }
    return value;
  }

  // Sorted runs of twice the length, of two neighbours each.
  WL_FN static void merge_runs(const wide* from, wide* to, int count, int run) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const wide value = from[i];
      const int other = (i & -run) ^ run, size = min(run, count - other);
      const int bound = upper(value) + (other < i);
      int before = 0;
#pragma unroll 1
      for (int step = run; step > 0; step /= 2) {
        const int next = before + step;
        if (next <= size && upper(from[other + next - 1]) < bound) before = next;
      }
      to[(i & -2 * run) + (i & (run - 1)) + before] = value;
    }
  }

  WL_FN static int upper(wide value) { return int(value >> 32); }

  wide* sums_;
  unsigned* votes_;
  unsigned seen_ = 0;
  int turn_ = 0;
};

}  // namespace warploom
