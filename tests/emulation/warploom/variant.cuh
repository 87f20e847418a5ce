// Stands in for the device's header of that name: functors as the host computes them.
#pragma once

#include <warploom/variant.hpp>

namespace warploom {
inline void store_words(void* to, const uint4& words) { std::memcpy(to, &words, sizeof(words)); }
}  // namespace warploom
