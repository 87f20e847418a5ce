// Spans of memory into the caches of a core, line by line.
#pragma once

#include <warploom/qualifiers.hpp>

#include <warploom/prefetch_base.hpp>

namespace warploom {

constexpr int kPrefetchLine = 64;

template <class K>
void run_prefetch(const typename K::Params& p) {
  const long long count = p.spans[0].offset;
  for (long long i = 1; i <= count; ++i) {
    const Lines<kPrefetchLine> lines(p, p.spans[i]);
    for (int at = 0; at < lines.bytes; at += kPrefetchLine) {
      __builtin_prefetch(reinterpret_cast<const char*>(lines.first + at));
    }
  }
}

}  // namespace warploom
