// Stands in for the device's header of that name: functors as the host computes them.
#pragma once

#include <warploom/variant.hpp>

namespace warploom {
inline float reciprocal(float x) { return 1.0f / x; }
}  // namespace warploom
