// Names of the types that products take.
#pragma once

#include <warploom/variant.hpp>

namespace cutlass {
using half_t = warploom::half_t;
using bfloat16_t = warploom::bfloat16_t;
}  // namespace cutlass
