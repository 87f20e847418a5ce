// Memory to prefetch, as both back ends see it: the whole cache lines around a span.
#pragma once

namespace warploom {

template <int kLine>
struct Lines {
  unsigned long long first;  // address of the first one
  int bytes;                 // a multiple of kLine

  // The line that a span ends in is fetched whole. It may reach past what was allocated, but not
  // into another page of memory.
  template <class Params, class Span>
  WL_FN Lines(const Params& p, const Span& span) {
    const char* const source = span.source == 0 ? p.first_source : p.second_source;
    const auto begin = reinterpret_cast<unsigned long long>(source) + span.offset;
    const auto end = (begin + span.bytes + kLine - 1) / kLine * kLine;
    first = begin / kLine * kLine;
    bytes = static_cast<int>(end - first);
  }
};

}  // namespace warploom
