// Spans of memory into L2. Nobody waits for what was asked for, so the kernel ends before it comes.
#pragma once

#include <warploom/device/prefetch_ptx.cuh>

#include <warploom/prefetch_base.hpp>

namespace warploom {

constexpr int kPrefetchLine = 128, kPrefetchSector = 32, kPrefetchWarp = 32;

// A thread asks for a span by one instruction or, before sm_90, the threads of a warp for a sector
// each: how much more than that one `prefetch` brings is not documented.
template <bool kKeep>
WL_FN void prefetch_lines(const Lines<kPrefetchLine>& lines, int lane) {
  if constexpr (kBulkPrefetch) {
    prefetch_bulk<kKeep>(lines.first, lines.bytes);
  } else {
    for (int at = lane * kPrefetchSector; at < lines.bytes; at += kPrefetchWarp * kPrefetchSector) {
      prefetch_sector<kKeep>(lines.first + at);
    }
  }
}

// All spans, in the order of the table: CTAs take the next one in turn. How many there are is read
// from memory, so a captured launch follows a table that is written anew.
template <class K>
WL_FN void run_prefetch(const typename K::Params& p) {
  constexpr int kTeam = kBulkPrefetch ? 1 : kPrefetchWarp;
  const long long count = p.spans[0].offset;
  const int team = threadIdx.x / kTeam, teams = blockDim.x / kTeam;
  const long long step = static_cast<long long>(gridDim.x) * teams;
  for (long long i = blockIdx.x + static_cast<long long>(gridDim.x) * team; i < count; i += step) {
    const auto span = p.spans[1 + i];
    const Lines<kPrefetchLine> lines(p, span);
    prefetch_lines<K::Config::kKeep>(lines, threadIdx.x % kTeam);
  }
}

}  // namespace warploom
